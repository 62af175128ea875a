"""What a reducer keeps from step to step, and what changes it between two steps.

:class:`Kept` shows all of it: by tensor, by bucket, and by place of a payload. :mod:`.withholding` has what waits for
elements that rounds leave out, and :func:`replan` goes on with other buckets. All of this is done between two steps,
and on every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..codecs.base import Held
from ..codecs.work import LAST, MOMENTA
from ..errors import ConfigError
from ..ops.checksums import hash_of
from ..schedule.by_name import check_number
from ..schedule.plan import Plan
from .agreement.differences import TABLES
from .bucket.pruned import Rest
from .bucket.shares import owned, share_of
from .buckets import Buckets
from .context import Context
from .withholding import Withholding

# ---- all that is kept ----------------------------------------------------------------------------


class Kept:
    """Views of all that is kept, and what changes it between two steps.

    Args:
        wait_idle: waits for the end of a step for some seconds; returns whether it is there.

    Attributes:
        withholding: what waits for elements that rounds leave out, in units of gradients.
        summed: results are sums over ranks, be it of one; None where that is not known yet.
    """

    summed: bool | None = None

    def __init__(self, context: Context, buckets: Buckets, wait_idle: Callable[[float], bool]) -> None:
        self._context, self._buckets, self._wait_idle = context, buckets, wait_idle
        self.withholding = Withholding(context, buckets)
        #: Tables were changed by something else than a round, so that ranks have to compare them.
        self.tables_touched = True

    @property
    def ranks(self) -> int:
        """Return how many ranks methods exchange among."""
        return self._context.between.size

    @property
    def hosts(self) -> list[int] | None:
        """Return, where ranks share hosts, how many these are, the number of this one, and this rank's place on it."""
        host = self._context.host
        return [host.between.size, host.between.rank, host.within.rank] if host else None

    def shares(self, plan: Plan) -> Plan:
        """Return the buckets of a plan as this rank keeps them: its shares, where ranks share hosts."""
        if (host := self._context.host) is None:
            return plan
        return Plan(tuple(share_of(bucket, host.within.rank, host.within.size) for bucket in plan.buckets))

    # ---- views ----

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return what is kept for all that rounds see: by what it is, then by tensor; these are views."""
        found: dict[str, dict[str, Tensor]] = {}
        self._follow()
        for state in self._buckets:
            for kind, kept in state.memory.state.items():
                for position, tensor in enumerate(state.bucket.tensors):
                    found.setdefault(kind, {})[tensor.name] = kept[state.memory.span(position)]
        return found

    def whole(self) -> dict[str, dict[str, Tensor]]:
        """Return :meth:`states` with 0 for what is pruned, in copies."""
        found = self.states()
        for state in (state for state in self._buckets if state.pruned):
            for position, tensor in enumerate(state.bucket.tensors):
                for kept in (kept for kept in found.values() if tensor.name in kept):
                    kept[tensor.name] = state.pruned.spread(position, kept[tensor.name])  # type: ignore[union-attr]
        return found

    def put(self, saved: Mapping[str, Mapping[str, Tensor]] | None) -> None:
        """Let all elements have what :meth:`whole` returned, or zeros."""
        found = self.states()
        for state in self._buckets:
            for position, name in enumerate(tensor.name for tensor in state.bucket.tensors):
                for kind, kept in ((kind, kept[name]) for kind, kept in found.items() if name in kept):
                    kept.zero_() if saved is None else kept.copy_(owned(state.pruned, position, saved[kind][name]))

    def of(self, index: int) -> dict[str, Tensor]:
        """Return what is kept for the tensor of this number in the plan, where it has a part of it; these are views."""
        state, position = self._buckets.where(index)
        state.device.wait_events(state.decoded)
        kinds = {kind: kept[state.memory.span(position)] for kind, kept in state.memory.state.items()}
        return kinds | state.rounds.tables.of(position)

    def set_aside(self, index: int) -> dict[str, Tensor]:
        """Return a copy of all that is kept for one tensor, for :meth:`put_back`."""
        state, position = self._buckets.where(index)
        copies = {kind: kept.clone() for kind, kept in self.of(index).items()}
        return copies | {"waiting": state.memory.withheld.dense(position)} if state.memory.withheld.any else copies

    def put_back(self, index: int, saved: Mapping[str, Tensor]) -> None:
        """Let what is kept for one tensor be as it was, between two steps, and on every rank alike."""
        state, position = self._buckets.where(index)
        for kind, kept in self.of(index).items():
            kept.copy_(saved[kind])
        if "waiting" in saved:
            state.memory.withheld.put(position, saved["waiting"])
        state.rounds.resume()  # something may wait again
        self.tables_touched = self.tables_touched or bool(state.rounds.tables.of(position))
        self._context.devices.synchronize()

    def tables(self) -> dict[str, Tensor]:
        """Return what is kept for whole buckets, by bucket and name."""
        self._follow()
        return {f"{s.bucket.index} {n}": table for s in self._buckets for n, table in s.memory.tables.items()}

    def carries(self) -> dict[str, Tensor]:
        """Return what merging keeps on this rank, by bucket and what it belongs to."""
        self._follow()
        return {f"{s.bucket.index} {name}": kept for s in self._buckets for name, kept in s.rounds.carry().items()}

    def show(self, step: int, values: Mapping[str, object]) -> None:
        """Show the other ranks what this one decodes with in the coming step, beside consensus bytes.

        Args:
            values: by name, see :mod:`.agreement.differences`; None for nothing.
        """
        operands = self._context.operands
        operands.step = step
        for name, value in values.items():
            operands.show(name, value)
        self.show_tables()

    def show_tables(self) -> None:
        """Show them what tables hold, if anything but a round has changed it: rounds do so by consensus bytes."""
        if self.tables_touched:
            self._follow()  # ranks of one host own different shares, and have tables of their own
            common = [] if self._context.host else [s for s in self._buckets if not s.rounds.tables.own]
            held = [table for state in common for _, table in sorted(state.memory.tables.items())]
            self._context.operands.show(TABLES, f"{hash_of(held):016x}" if held else None)
            self.tables_touched = False

    def residuals(self) -> dict[str, Tensor]:
        """Return the residual of every tensor that has one, by name; these are views."""
        return self.states().get("residual", {})

    def residual_norm(self, divisors: Mapping[str, Tensor]) -> float:
        """Return the Euclidean norm of all residuals of this rank, times what they are divided by, flat and by name."""
        by = self._buckets.owned(divisors)
        return norm_of(r * by[name].to(r.device) if name in by else r for name, r in self.residuals().items())

    def _follow(self) -> None:
        """Let this thread's streams go on after the last results."""
        for state in self._buckets:
            state.device.wait_events(state.decoded)

    # ---- other masks ----

    def rows(self) -> dict[str, int]:
        """Return how long the rows of tensors are that can be pruned, see :func:`.bucket.pruned.rows_of`."""
        return self._buckets.rows()

    def mask(self, kinds: Mapping[str, Tensor], rest: Mapping[str, Rest]) -> None:
        """Let all rounds leave out masked elements, and payloads have no room for those that are pruned.

        What is kept for the elements of a tensor goes with them; what merging keeps begins with zeros.

        Args:
            kinds: see :meth:`Withholding.mask`.
            rest: by name, what is left of tensors that are pruned. The same object stands for the same elements.
        """
        context, buckets = self._context, self._buckets
        if all(buckets.rest.get(name) is rest.get(name) for name in {*buckets.rest, *rest}):
            self.withholding.mask(kinds)
            return
        context.devices.synchronize()
        before, waiting, states, known = self.whole(), self.withholding.waiting(), list(buckets), buckets.rest
        with context.changed:
            try:
                buckets.take_rest(rest)
                self.put(before)
                self.withholding.mask(kinds)
                self.withholding.load(waiting)
            except BaseException:  # no memory: as before, so that nothing is lost if the step is tried again
                buckets.go_back(states, known)
                raise
            context.changed.notify_all()

    # ---- other units ----

    def convert(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply what is kept for elements, flat and by tensor, between two steps: it has other units from now on."""
        if not factors:
            return
        factors = self._buckets.owned(factors)
        for kept in self.states().values():
            for name in kept.keys() & factors.keys():
                kept[name].mul_(factors[name].to(kept[name].device))
        self._context.devices.synchronize()

    def scale_errors(self, factors: Mapping[str, float], *, last: bool = False) -> float:
        """Multiply what waits, by tensor, or only what goes on from the last result; return the most, at least 1."""
        if not factors:
            return 1.0
        kinds = [of for kind, of in self.states().items() if (kind == LAST if last else kind not in MOMENTA)]
        found = [(of[name], factors[name]) for of in kinds for name in of.keys() & factors.keys()]
        for kept, factor in found:
            kept.mul_(factor)
        self.withholding.scale(1.0, {} if last else factors)
        self._context.devices.synchronize()
        return max([1.0, *(factor for _, factor in found)])

    def scale(self, factor: float) -> None:
        """Multiply all that is kept, between two steps: gradients are so much larger from now on.

        Raises:
            ConfigError: a step is under way.
        """
        if not self._wait_idle(self._context.options.longest_seconds):
            raise ConfigError(f"rank {self._context.rank}: update a gradient scaler between steps; one is under way")
        with torch.no_grad():
            for tensor in (tensor for kept in self.states().values() for tensor in kept.values()):
                tensor.mul_(factor)
            for state in self._buckets:
                state.rounds.tables.scale(factor)
            self.withholding.scale(factor)
        self.tables_touched = True
        self._context.devices.synchronize()


def norm_of(kept: Iterable[Tensor]) -> float:
    """Return the Euclidean norm of all of some tensors, of whatever dtype."""
    wide = ((one, torch.promote_types(one.dtype, torch.float32)) for one in kept if one.numel())
    return math.hypot(*(float(torch.linalg.vector_norm(one, dtype=dtype)) for one, dtype in wide))


# ---- other buckets -------------------------------------------------------------------------------


def check_plan(context: Context, buckets: Buckets, plan: Plan) -> None:
    """Refuse buckets that :func:`replan` could not go on with.

    Raises:
        ConfigError: says what they should be.
    """
    check_number(plan, context.shares)
    plan.check_covers([tensor for bucket in buckets.plan.buckets for tensor in bucket.tensors])
    before, after = ({t.name: b.method for b in p.buckets for t in b.tensors} for p in (buckets.plan, plan))
    if before != after:
        name = next(name for name in before if before[name] != after[name])
        raise ConfigError(
            f"rank {context.rank}: {name} has a different method in the new buckets; its state would be lost"
        )
    if tables := buckets.tables_that_stay():
        raise ConfigError(
            f"rank {context.rank}: this method keeps {', '.join(sorted(tables))} for whole buckets, so the "
            'buckets cannot be changed; choose a fixed schedule such as "size:25MB"'
        )


def replan(context: Context, buckets: Buckets, kept: Kept, plan: Plan) -> None:
    """Take other buckets; what is kept for the elements of a tensor goes with it, bit by bit.

    What tables hold goes with it as far as their method can tell one tensor from another.
    """
    plan = plan.placed(tensor for bucket in buckets.plan.buckets for tensor in bucket.tensors)
    context.devices.synchronize()
    before, waiting, step = kept.whole(), kept.withholding.waiting(), buckets.next_step()
    states, known = list(buckets), buckets.rest
    tables = {state.bucket: state.memory.tables for state in buckets}
    held: dict[str, Held] = {}
    for state in buckets:
        if state.bucket not in plan.buckets:
            held |= state.rounds.tables.read(context.coding_key(step, state.bucket.index))
    with context.changed:
        try:
            buckets.take_plan(plan)
            kept.put(before)
            kept.withholding.load(waiting)
            for state in buckets:
                if state.bucket in tables:  # it stays as it is
                    for name, table in tables[state.bucket].items():
                        state.memory.tables[name].copy_(table)
                else:
                    state.rounds.tables.write(held, context.coding_key(step, state.bucket.index))
                state.resume(step)
            context.devices.synchronize()
        except BaseException:  # no memory: as before
            buckets.go_back(states, known)
            raise
        context.changed.notify_all()
