"""What a reducer keeps from step to step: by tensor, by bucket, and by place of a payload."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.checksums import hash_of
from .agreement.operands import TABLES
from .buckets import Buckets
from .context import Context
from .withholding import Withholding


class Kept:
    """Views of all that is kept, and what changes it between two steps.

    Args:
        wait_idle: waits for the end of a step for some seconds; returns whether it is there.

    Attributes:
        withholding: what waits for elements that rounds leave out, in units of gradients.
    """

    def __init__(self, context: Context, buckets: Buckets, wait_idle: Callable[[float], bool]) -> None:
        self._context, self._buckets, self._wait_idle = context, buckets, wait_idle
        self.withholding = Withholding(context, buckets)
        #: Tables were changed by something else than a round, so that ranks have to compare them.
        self.tables_touched = True

    # ---- views ----

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return what is kept for every element: by what it is, then by tensor; these are views."""
        found: dict[str, dict[str, Tensor]] = {}
        self._follow()
        for state in self._buckets:
            for kind, kept in state.memory.state.items():
                for position, tensor in enumerate(state.bucket.tensors):
                    found.setdefault(kind, {})[tensor.name] = kept[state.memory.span(position)]
        return found

    def of(self, index: int) -> dict[str, Tensor]:
        """Return what is kept for the elements of one tensor, by its place in the plan; these are views."""
        state, position = self._buckets.where(index)
        state.device.wait_events(state.decoded)
        return {kind: kept[state.memory.span(position)] for kind, kept in state.memory.state.items()}

    def set_aside(self, index: int) -> dict[str, Tensor]:
        """Return a copy of all that is kept for the elements of one tensor, for :meth:`put_back`."""
        state, position = self._buckets.where(index)
        copies = {kind: kept.clone() for kind, kept in self.of(index).items()}
        return copies | {"waiting": state.memory.withheld.dense(position)} if state.memory.withheld else copies

    def put_back(self, index: int, saved: Mapping[str, Tensor]) -> None:
        """Let what is kept for one tensor be as it was, between two steps, and on every rank alike."""
        state, position = self._buckets.where(index)
        for kind, kept in self.of(index).items():
            kept.copy_(saved[kind])
        if "waiting" in saved:
            state.memory.withheld.put(position, saved["waiting"])
        state.rounds.resume()  # something may wait again
        self._context.devices.synchronize()

    def tables(self) -> dict[str, Tensor]:
        """Return what is kept for whole buckets, by bucket and name."""
        self._follow()
        return {f"{s.bucket.index} {n}": table for s in self._buckets for n, table in s.memory.tables.items()}

    def carries(self) -> dict[str, Tensor]:
        """Return what merging keeps on this rank, by bucket and what it belongs to."""
        self._follow()
        return {f"{s.bucket.index} {name}": kept for s in self._buckets for name, kept in s.rounds.carry().items()}

    def show_tables(self) -> None:
        """Show the other ranks what tables hold, if something else than a round has changed it; between two steps.

        Rounds change it by consensus bytes alone.
        """
        if self.tables_touched:
            held = [table for _, table in sorted(self.tables().items())]
            self._context.operands.show(TABLES, f"{hash_of(held):016x}" if held else None)
            self.tables_touched = False

    def residuals(self) -> dict[str, Tensor]:
        """Return the residual of every tensor that has one, by name; these are views."""
        return self.states().get("residual", {})

    def residual_norm(self) -> float:
        """Return the Euclidean norm of all residuals of this rank."""
        squares = [float(torch.linalg.vector_norm(r)) ** 2 for r in self.residuals().values() if r.numel()]
        return sum(squares) ** 0.5

    def _follow(self) -> None:
        """Let this thread's streams go on after the last results."""
        for state in self._buckets:
            state.device.wait_events(state.decoded)

    # ---- other units ----

    def convert(self, factors: Mapping[str, Tensor]) -> None:
        """Multiply what is kept for elements, flat and by tensor, between two steps: it has other units from now on."""
        if not factors:
            return
        for kept in self.states().values():
            for name in kept.keys() & factors.keys():
                kept[name].mul_(factors[name].to(kept[name].device))
        self._context.devices.synchronize()

    def scale_errors(self, factors: Mapping[str, float]) -> None:
        """Multiply what waits to be sent, by tensor, between two steps; momentum stays as it is."""
        if not factors:
            return
        for kind, kept in self.states().items():
            for name in kept.keys() & factors.keys() if kind != "momentum" else ():
                kept[name].mul_(factors[name])
        self.withholding.scale(1.0, factors)
        self._context.devices.synchronize()

    def scale(self, factor: float) -> None:
        """Multiply all that is kept, between two steps: gradients are so much larger from now on.

        Raises:
            ConfigError: a step is under way.
        """
        if not self._wait_idle(self._context.options.longest_seconds):
            raise ConfigError(
                f"rank {self._context.rank}: a gradient scaler can be updated between steps only, and a step is under "
                "way"
            )
        with torch.no_grad():
            for kept in (*self.states().values(), self.tables()):
                for tensor in kept.values():
                    tensor.mul_(factor)
            self.withholding.scale(factor)
        self.tables_touched = True
        self._context.devices.synchronize()
