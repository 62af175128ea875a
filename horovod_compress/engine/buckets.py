"""The buckets of the plan in use: what stays of each from step to step, and what the coming step does with them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..codecs.base import Codec, Divides, Properties, tables_that_stay, variants_of, zero_groups_of
from ..codecs.by_step import ByStep
from ..codecs.dense import Dense, LeftPlain
from ..codecs.work import work_dtype
from ..exchange.choose import Choose
from ..exchange.device import Device, Event
from ..exchange.transports.transport import NcclLink
from ..schedule.plan import Bucket, Plan
from .bucket import withheld
from .bucket.fits import refuse
from .bucket.memory import Memory, Site, make_round
from .bucket.pruned import PrunedBucket, Rest, rows_of
from .bucket.round import Round
from .bucket.rounds import HELD, METHODLESS, WITHOUT, Kind, Next, Tables, labels, without_method
from .bucket.shares import HostBucket, HostMemory, owned
from .context import Context

# ---- one bucket ----------------------------------------------------------------------------------

_CPU = Device()


class BucketState:
    """What stays of one bucket on one rank between its turns: its memory, and its kinds of rounds.

    Args:
        staged: whether payloads are exchanged from copies in host memory.
        link: or from where they are.
        part: what rounds see of the bucket, where ranks share hosts or weights are pruned; memory and rounds are then
            those of its share.
        always: see :class:`Rounds`.

    Attributes:
        grads: this step's gradients, contiguous, one per tensor; results are written over them.
        finished: the last step whose result is ready.
        decoded: how far that is on a device, for whoever goes on with it.
        dropped: how many kept values were dropped so far as they were not finite, by tensor.
        fetched: where counts are fetched to from a device, once for all steps: such memory takes long to get.
    """

    def __init__(
        self,
        bucket: Bucket,
        codec: Codec,
        rank: int,
        world: int,
        collective: Choose,
        device: Device = _CPU,
        staged: bool = False,
        link: NcclLink | None = None,
        part: HostBucket | PrunedBucket | None = None,
        always: Kind | None = None,
    ) -> None:
        self.bucket, self.device, self.part = bucket, device, part
        self.hosted = hosted = part if isinstance(part, HostBucket) else None
        self.pruned = part if isinstance(part, PrunedBucket) else None
        alone = world == 1
        site = Site(rank, world, collective, device, staged and not alone, None if alone else link)
        self.memory = Memory(part.share if part else bucket, codec, site, bucket)
        self.grads = part.grads if part else self.memory.grads
        self.rounds = Rounds(codec, self.memory, "plain" if hosted and hosted.alone else always)
        self.finished = -1
        self.decoded: Event = None
        self.dropped: dict[str, int] = {}
        self.fetched = device.host_zeros(len(bucket.tensors) if device.is_accelerator else 0, torch.int64)

    def round(self, step: int) -> Round:
        """Return the round of a step."""
        return self.rounds.at(step)

    def seen(self, position: int, grad: Tensor) -> Tensor:
        """Return what rounds see of a gradient, flat: 0 where it is masked, without what is pruned."""
        flat, masked = owned(self.pruned, position, grad.contiguous().view(-1)), self.memory.withheld.masked(position)
        return flat if masked is None else flat.index_fill(0, masked, 0.0)

    def resume(self, step: int) -> None:
        """Go on at a step, with whatever was loaded."""
        self.finished = step - 1
        self.rounds.resume()

    def finish(self, step: int) -> None:
        """Mark the results of a step as ready, but for what is queued on the device."""
        self.decoded = self.device.record_event()
        self.finished = step

    def drop_spoilt(self, position: int) -> bool:
        """Drop what waits for a tensor and would spoil this step and all later ones; return whether there was any."""
        found = sum(withheld.drop(kept[self.memory.span(position)]) for kept in self.memory.state.values())
        if found:
            name = self.bucket.tensors[position].name
            self.dropped[name] = self.dropped.get(name, 0) + found
        return found > 0


class Rounds:
    """Makes the rounds of a method, and chooses among them.

    Args:
        always: the one kind of rounds without the method that there is, "plain" or "alone"; None for all.
    """

    def __init__(self, codec: Codec, memory: Memory, always: Kind | None = None) -> None:
        self._codec, self._memory, self._always = codec, memory, always
        #: Where a second moment that is held divides in the compressed rounds.
        self.divides: Divides = "never" if always == "alone" else codec.properties().divides
        self._empties = isinstance(codec, LeftPlain) and codec.plain_when_empty(memory.bucket)
        self.kinds = {kind: self._make(kind, label) for kind, label in labels(variants_of(codec)).items()}
        self.tables = Tables(memory, self.kinds.values())
        self.next = Next()
        self._methodless: dict[Kind, Round] = {}
        self._last: tuple[int, Round] | None = None  # the step that was asked for last: every gradient asks
        self._nothing_waits = False  # see :meth:`note_emptied`
        if self._empties or always:
            self._make_methodless(always or "plain")

    def _make(self, codec: Codec, label: str) -> Round:
        own = self._memory.layout(codec).state
        # Plain rounds send and empty whatever waits.
        kept = {n: kept for n, kept in self._memory.state.items() if n in own or isinstance(codec, Dense)}
        return make_round(self._memory, codec, label, self._memory.payload, kept, exact=isinstance(codec, Dense))

    def _make_methodless(self, kind: Kind) -> None:
        memory, codec = self._memory, without_method(kind, self._memory.bucket, self._memory.site.choose)
        kept = memory.state if kind == "alone" else {}
        made = make_round(memory, codec, codec.name, memory.payload_that_holds(codec), kept, exact=True)
        memory.site.device.synchronize()  # what is queued may still use the others; between two steps nothing comes
        plain = {other: known for other, known in self._methodless.items() if other == "plain"}
        self._methodless = plain | {kind: made}

    def at(self, step: int) -> Round:
        """Return the round of a step."""
        if self._always or self._nothing_waits:
            return self._methodless[self._always or "plain"]
        if self.next.kind in METHODLESS and not (self.next.kind == "short" and self._sends_numbers(step)):
            return self._methodless[self.next.kind]
        last = self._last
        if last is None or last[0] != step:
            index = step if self.next.index is None else self.next.index
            codec = self._codec.for_step(index, without=WITHOUT.get(self.next.kind, 0))
            last = self._last = step, self.kinds[codec]
        return last[1]

    def _sends_numbers(self, step: int) -> bool:
        """Return whether somebody chose plain numbers for this step."""
        return isinstance(self._codec, ByStep) and self._codec.sends_numbers(step)

    def choose(self, coming: Next) -> None:
        """Choose what the coming steps exchange; between two steps, on every rank alike."""
        if coming.kind in HELD and self.divides == "never":
            return  # a second moment that is held is nothing to this method
        if coming.kind == "short" and all(isinstance(kind, Dense) for kind in self.kinds):
            coming = Next()  # its rounds are as exact as somebody wanted them
        if coming.kind in METHODLESS and not (self._always or coming.kind in self._methodless):
            self._make_methodless(coming.kind)
        self.next, self._last = coming, None

    def zero_groups(self) -> dict[str, int]:
        """Return, by tensor, which zeros stay zeros in the compressed rounds; see ``Layout.zero_groups``."""
        bucket, codec = self._memory.whole, self._codec
        groups = zero_groups_of(codec, bucket, self._memory.site.world)
        return {tensor.name: group for tensor, group in zip(bucket.tensors, groups, strict=True)}

    def note_emptied(self) -> None:
        """Take note that a round went well on every rank: nothing waits now, where every round sends all of it."""
        if self.next.kind in METHODLESS or self._nothing_waits or not self._empties:
            return
        if all(grad is not None for grad in self._memory.grads):  # what was skipped may wait
            self._nothing_waits = True
            # A gradient of -0 plus this is -0: a job that goes on from a checkpoint, and adds it again, has equal bits.
            self._memory.state["residual"].fill_(-0.0)

    def resume(self) -> None:
        """Go on with whatever was loaded."""
        self._nothing_waits = False
        if self._always == "alone":
            self._let_all_wait()

    def _let_all_wait(self) -> None:
        """Let what this rank kept as an owner wait with its residual, and no momentum go on: no round uses them now."""
        method, state = self._codec, self._memory.state
        kinds = variants_of(method.codec if isinstance(method, LeftPlain) else method)
        owned = {name for kind in kinds for name in kind.folded}
        for name in state.keys() - {"residual"}:
            if name in owned:
                state["residual"] += state[name]
            state[name].zero_()
        self._memory.site.device.synchronize()

    def carry(self) -> dict[str, Tensor]:
        """Return what merging keeps, by what it belongs to."""
        return {
            f"{round_.label} {name} {round_.collective.name}": carry.kept
            for round_ in self.kinds.values()
            for name, carry in round_.work.carry.items()
        }


# ---- all buckets ---------------------------------------------------------------------------------


class Buckets:
    """The states of all buckets, in plan order: where each tensor is, and what the coming step does with them.

    What changes the coming step is called between two steps, and on every rank alike.

    Args:
        codecs: the methods by number.
        collective: picks how a bucket's payloads become one.
        alone: this is the only rank, and has its gradients back with whatever waits, whatever the method.
    """

    def __init__(
        self, context: Context, plan: Plan, codecs: Sequence[Codec], collective: Choose, *, alone: bool = False
    ) -> None:
        self._context, self._codecs, self._collective, self.alone = context, codecs, collective, alone
        tensors = [tensor for bucket in plan.buckets for tensor in bucket.tensors]
        self._host_memory = HostMemory(context.host, tensors) if context.host else None
        #: Tensors that nothing is exchanged for, in plan order.
        self.frozen: frozenset[int] = frozenset()
        #: By name, what is left of pruned tensors.
        self.rest: Mapping[str, Rest] = {}
        self._linear: Collection[str] = ()  # see set_linear()
        self.take_plan(plan)

    def take_plan(self, plan: Plan) -> None:
        """Make the buckets of a plan, with nothing in them."""
        states = [self._make(bucket) for bucket in plan.buckets]  # first, as there may be no memory for them
        self.plan, self._states = plan, states
        self._settle()

    def take_rest(self, rest: Mapping[str, Rest]) -> None:
        """Let rounds see what is left of pruned tensors; buckets that this changes have nothing in them."""
        before, self.rest = self.rest, rest

        def again(state: BucketState) -> BucketState:
            if all(rest.get(tensor.name) is before.get(tensor.name) for tensor in state.bucket.tensors):
                return state
            made = self._make(state.bucket)
            made.rounds.choose(state.rounds.next)
            made.resume(state.finished + 1)
            return made

        self.go_back([again(state) for state in self], rest)

    def go_back(self, states: Sequence[BucketState], rest: Mapping[str, Rest]) -> None:
        """Have these states, in the same list: the exchange thread waits for its first bucket."""
        self._states[:], self.rest = states, rest
        self.plan = Plan(tuple(state.bucket for state in states))
        self._settle()

    def _settle(self) -> None:
        self._context.devices.synchronize()  # memory is zero before a thread of another stream looks at it
        self._where = [(state, position) for state in self for position in range(len(state.bucket.tensors))]
        self.set_linear(self._linear)
        tensors = ((state.device.where, tensor) for state in self for tensor in state.bucket.tensors)
        self._fits = [(tensor.shape, getattr(torch, tensor.dtype), where) for where, tensor in tensors]
        #: The step under way, and its tensors by the address of their gradients.
        self.addresses: tuple[int, dict[int, int]] = -1, {}

    def _make(self, bucket: Bucket) -> BucketState:
        context, where = self._context, self._context.devices[bucket.device]
        link = context.transport.link
        if link and link.where is not where:
            link = None
        staged, rank, world = where.is_accelerator and not link, context.between.rank, context.between.size
        codec, memory = self._codecs[bucket.method], self._host_memory
        if bucket.plain:
            codec = LeftPlain(codec, bool(codec.layout(bucket, world).state))
        part: HostBucket | PrunedBucket | None = None
        if context.host and memory:
            part = HostBucket(context.host, memory, bucket, context.exchange, context.metrics)
        elif any(tensor.name in self.rest for tensor in bucket.tensors):
            part = PrunedBucket(bucket, self.rest)
        always: Kind | None = "alone" if self.alone else None
        return BucketState(bucket, codec, rank, world, self._collective, where, staged, link, part, always)

    def rows(self) -> dict[str, int]:
        """Return the rows of tensors that can be pruned, see :func:`rows_of`: tables hold places in whole ones."""
        world, plan = self._context.between.size, self.plan.buckets
        tables = {each.method for each in plan if self._codecs[each.method].layout(each, world).tables}
        found = (rows_of(self._codecs[each.method], each, world) for each in plan if each.method not in tables)
        return {name: row for rows in found for name, row in rows.items()}

    def __iter__(self) -> Iterator[BucketState]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, number: int) -> BucketState:
        return self._states[number]

    def is_last(self, state: BucketState) -> bool:
        """Return whether a step ends with this bucket."""
        return state is self._states[-1]

    def where(self, index: int) -> tuple[BucketState, int]:
        """Return the bucket of a tensor, by its place in the plan, and its position in there."""
        return self._where[index]

    def check_fits(self, index: int, grad: Tensor) -> None:
        """Refuse a gradient that is not of the tensor at ``index``.

        Raises:
            ConfigError: says what it should be.
        """
        fits = (grad.shape, grad.dtype, grad.device) == self._fits[index]
        if fits and (grad.is_contiguous() or 0 not in grad.stride()):
            return
        (state, position), rank = self._where[index], self._context.rank
        refuse(grad, state.bucket.tensors[position], state.device.where, rank)

    def tables_that_stay(self) -> set[str]:
        """Return what is kept for whole buckets and cannot follow their tensors to others."""
        world, kept = self._context.between.size, (state.memory.bucket for state in self if not state.bucket.plain)
        return {name for bucket in kept for name in tables_that_stay(self._codecs[bucket.method], bucket, world)}

    def owned(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what this rank owns of flat tensors, by name."""
        return {
            tensor.name: owned(state.part, position, values[tensor.name])
            for state in self
            for position, tensor in enumerate(state.bucket.tensors)
            if tensor.name in values
        }

    # ---- how far they are ----

    def next_step(self) -> int:
        """Return the step that the next gradient will belong to, between two steps."""
        return self._states[0].finished + 1 if self._states else self._context.progress.step

    # ---- the coming step ----

    def choose(self, coming: Next) -> None:
        """Choose what the coming steps exchange."""
        with self._context.changed:
            for state in self:
                state.rounds.choose(coming)

    def exact_until(self) -> int:
        """Return the step at which the last method begins to compress."""
        return max((codec.exact_until() for codec in self._codecs if isinstance(codec, ByStep)), default=0)

    def divided(self) -> list[Properties]:
        """Return what is true of the methods that divide by a second moment."""
        return [found for codec in self._codecs if (found := codec.properties()).divides != "never"]

    def divides(self) -> dict[str, Divides]:
        """Return, by tensor, where a second moment that is held divides."""
        return {tensor.name: state.rounds.divides for state in self for tensor in state.bucket.tensors}

    def divide_by(self, divisors: Mapping[str, Tensor]) -> None:
        """Let these divide the gradients of some tensors before they are encoded.

        Args:
            divisors: flat, by name; equal on every rank.
        """
        for state in self:
            dtype, mine = work_dtype(state.bucket), state.memory.divisors
            mine.clear()
            for position, name in enumerate(tensor.name for tensor in state.bucket.tensors):
                if name in divisors:
                    mine[position] = owned(state.part, position, divisors[name].to(dtype))

    def set_linear(self, names: Collection[str]) -> None:
        """Let methods know which parameters move by steps that are linear in what they decode: those of SGD.

        Buckets that are made anew know it, too.
        """
        self._linear = names
        for state in self:
            linear = state.memory.linear
            linear.clear()
            linear.update(place for place, tensor in enumerate(state.bucket.tensors) if tensor.name in names)

    def sends_some(self, index: int) -> bool:
        """Return whether rounds may send some elements of a tensor only, so that momentum is emptied there."""
        codec = self._codecs[self._where[index][0].bucket.method]
        return any(kind.properties().share_sent < 1 for kind in (codec, *variants_of(codec)))

    def clear_where_sent(self, index: int, momenta: Sequence[Tensor]) -> None:
        """Let a method empty these where this rank's payload carried a value, or its host's: momentum masking.

        Args:
            momenta: of the shape of the tensor at ``index`` and contiguous.
        """
        state, position = self._where[index]
        assert not state.pruned  # of what is left this would be a copy; update mode refuses masks
        flat = [momentum.view(-1) for momentum in momenta]
        state.memory.momenta[position] = state.hosted.empty_later(position, flat) if state.hosted else flat
