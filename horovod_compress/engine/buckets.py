"""The buckets of the plan in use, as one: where each tensor is, and what the coming step does with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ..codecs.base import Codec, Divides, tables_that_stay
from ..codecs.left_plain import LeftPlain
from ..codecs.work import work_dtype
from ..errors import ConfigError
from ..exchange.choose import Choose
from ..schedule.plan import Bucket, Plan
from .bucket.state import BucketState, Next
from .context import Context


class Buckets:
    """The states of all buckets, in plan order.

    What changes the coming step is called between two steps, and on every rank alike.

    Args:
        codecs: the methods by number.
        collective: picks how a bucket's payloads become one.
    """

    def __init__(self, context: Context, plan: Plan, codecs: Sequence[Codec], collective: Choose) -> None:
        self._context, self._codecs, self._collective = context, codecs, collective
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
            bucket, self._codec_of(bucket), context.rank, context.world, self._collective, where, staged, link
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

    def check_fits(self, index: int, grad: Tensor) -> None:
        """Refuse a gradient that is not of the tensor at ``index``.

        Raises:
            ConfigError: says what it should be.
        """
        (state, position), rank = self._where[index], self._context.rank
        tensor, where = state.bucket.tensors[position], state.device.where
        if tuple(grad.shape) != tensor.shape or str(grad.dtype) != f"torch.{tensor.dtype}":
            raise ConfigError(
                f"rank {rank}: the gradient of {tensor.name} should be {tensor.dtype} of shape {tensor.shape}, got "
                f"{grad.dtype} of shape {tuple(grad.shape)}"
            )
        if grad.device != where:
            raise ConfigError(
                f"rank {rank}: the gradient of {tensor.name} is on {grad.device}, its parameter was on {where} when "
                "the compression was made; move the model to its device first"
            )

    def tables_that_stay(self) -> set[str]:
        """Return what is kept for whole buckets and cannot follow their tensors to others."""
        world, kept = self._context.world, (state.bucket for state in self if not state.bucket.plain)
        return {name for bucket in kept for name in tables_that_stay(self._codecs[bucket.method], bucket, world)}

    # ---- how far they are ----

    def next_step(self) -> int:
        """Return the step that the next gradient will belong to, between two steps."""
        return self._states[0].finished + 1 if self._states else self._context.progress.step

    # ---- the coming step ----

    def choose(self, coming: Next) -> None:
        """Choose what the coming steps exchange."""
        with self._context.changed:
            for state in self:
                state.rounds.take(coming)

    def exact_until(self) -> int:
        """Return the step at which the last method begins to compress."""
        return max((codec.properties().exact_until for codec in self._codecs), default=0)

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
