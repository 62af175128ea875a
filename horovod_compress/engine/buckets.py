"""The buckets of the plan in use, as one: where each tensor is, and what the coming step does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ..codecs.base import Codec, Divides, tables_that_stay
from ..codecs.by_step import ByStep
from ..codecs.dense import LeftPlain
from ..codecs.work import work_dtype
from ..exchange.choose import Choose
from ..schedule.plan import Bucket, Plan
from .bucket.state import BucketState
from .context import Context


class Buckets:
    """The states of all buckets, in plan order.

    What changes the coming step is called between two steps, and on every rank alike.

    Args:
        codecs: the methods by number.
        choose: picks how a bucket's payloads become one.
    """

    def __init__(self, context: Context, plan: Plan, codecs: Sequence[Codec], choose: Choose) -> None:
        self._context, self._codecs, self._choose = context, codecs, choose
        #: Tensors that nothing is exchanged for, in plan order.
        self.frozen: frozenset[int] = frozenset()
        self.take_plan(plan)

    def take_plan(self, plan: Plan) -> None:
        """Make the buckets of a plan, with nothing in them."""
        self.plan = plan
        self._states = [self._make(bucket) for bucket in plan.buckets]
        self._context.devices.synchronize()  # memory is zero before a thread of another stream looks at it
        self._where = [(state, position) for state in self for position in range(len(state.bucket.tensors))]

    def _make(self, bucket: Bucket) -> BucketState:
        context, where = self._context, self._context.devices[bucket.device]
        link = context.transport.link
        if link and link.where is not where:
            link = None
        staged = where.is_accelerator and not link
        return BucketState(
            bucket, self._codec_of(bucket), context.rank, context.world, self._choose, where, staged, link
        )

    def _codec_of(self, bucket: Bucket) -> Codec:
        codec = self._codecs[bucket.method]
        return LeftPlain(codec, bool(codec.layout(bucket, self._context.world).state)) if bucket.plain else codec

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

    def tables_that_stay(self) -> set[str]:
        """Return what is kept for whole buckets and cannot follow their tensors to others."""
        world, kept = self._context.world, (state.bucket for state in self if not state.bucket.plain)
        return {name for bucket in kept for name in tables_that_stay(self._codecs[bucket.method], bucket, world)}

    # ---- how far they are ----

    def next_step(self) -> int:
        """Return the step that the next gradient will belong to, between two steps."""
        return self._states[0].finished + 1 if self._states else self._context.progress.step

    def idle(self) -> bool:
        """Return whether no step is under way."""
        with self._context.changed:
            finished = {state.finished for state in self}
            return len(finished) <= 1 and not any(state.offers.busy for state in self)

    def missing(self, step: int) -> list[str]:
        """Return the tensors that were not offered in a step that is under way."""
        with self._context.changed:
            late = (state.offers for state in self if state.finished < step and not state.offers.full)
            return [name for offers in late for name in offers.missing()]

    # ---- the coming step ----

    def next_steps(self, round_index: int | None = None, *, plain: bool = False, halved: bool = False) -> None:
        """Choose what the coming steps exchange.

        Args:
            round_index: stands for the step where a method's rounds differ by it; None for the step.
            plain: exchange what is offered as it is, without the method and its state.
            halved: then float32 is sent as bfloat16.
        """
        with self._context.changed:
            for state in self:
                state.rounds.set_round(round_index, plain, halved)

    def hold(self, exact: bool) -> None:
        """Choose what the coming step exchanges where a second moment is held.

        Args:
            exact: it sends gradients without the method and its state there.
        """
        with self._context.changed:
            for state in self:
                state.rounds.hold(exact)

    def exact_until(self) -> int:
        """Return the step at which the last method begins to compress."""
        return max((codec.exact_until() for codec in self._codecs if isinstance(codec, ByStep)), default=0)

    def needs_few_exact(self) -> bool:
        """Return whether no method that divides by a second moment needs many exact rounds for it."""
        found = [codec.properties() for codec in self._codecs]
        return all(each.law.few_exact for each in found if each.divides != "never")

    def divides(self) -> dict[str, Divides]:
        """Return, by tensor, where a second moment that is held divides."""
        return {tensor.name: state.rounds.divides() for state in self for tensor in state.bucket.tensors}

    def divide_by(self, divisors: Mapping[str, Tensor]) -> None:
        """Let these divide the gradients of some tensors before they are encoded.

        Args:
            divisors: flat, by name; equal on every rank.
        """
        for state in self:
            named, mine = enumerate(tensor.name for tensor in state.bucket.tensors), state.memory.divisors
            mine.clear()
            dtype = work_dtype(state.bucket)
            mine.update({position: divisors[name].to(dtype) for position, name in named if name in divisors})

    def clear_where_sent(self, index: int, momenta: Sequence[Tensor]) -> None:
        """Let a method empty these where this rank's payload carried a value: momentum masking.

        Args:
            momenta: of the shape of the tensor at ``index`` and contiguous.
        """
        state, position = self._where[index]
        state.memory.momenta[position] = [momentum.view(-1) for momentum in momenta]
