"""One bucket in one step: all that is under way of it, from its first gradient to its last result.

A gradient's way, and the thread that takes each part of it:

    claim      training    the gradient is announced; each tensor comes once in a step
    submit     offering    the codec reads it; on a device that only queues work, and the training thread does it
    exchange   exchange    preludes, then the payload, once every tensor is in, while backward still runs
    decode     decoding    parts of the result, as they arrive
    complete   decoding    what is left of it; what the round leaves becomes what the next one reads
    write_back decoding    results of gradients that are not contiguous, which are decoded in a copy
    take       training    the result: the gradient's own memory, overwritten

A gradient is held from its offer to its result and then overwritten in place: the residual rules read it a second time
at decoding, so no copy of ``gradient + residual`` is ever made, and the old residual is still there should the bucket
turn out not to be finite.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..codecs.work import Counts, Part
from ..errors import HorovodCompressError, NonFiniteError
from ..exchange.device import Deadline, Event
from ..exchange.wire import NonFiniteCount
from ..ops.keys import Key
from .bucket.round import nothing
from .bucket.shares import HostBucket
from .buckets import BucketState
from .context import Context, NonFinite

#: Gradients below are never refused for being too large: half of what rules/kept.h allows with a residual.
_HUGE = 2.0**95


@dataclass
class _Together:
    """Gradients that wait for the last one of their bucket, and the streams that they were offered on."""

    positions: list[int] = field(default_factory=list)
    streams: dict[int, Any] = field(default_factory=dict)


class Turn:
    """One bucket's turn in a step. Verbs and their threads are in the order of a gradient's way, see above.

    Args:
        state: what stays of the bucket from step to step.
        result_scale: what results are multiplied by: 1 for the mean over ranks, their number for the sum.
        factor: what they are handed back times, see :mod:`.norms`; as far as it is known.

    Attributes:
        round: what the bucket exchanges in this step.
        refused: why the codec could not take gradients, if it could not.
        error: what whoever asks for a result is told.
        decoding: seconds that parts of the result took to decode so far.
        taken: whether the exchange has begun.
        over: whether the results are there; what is offered now belongs to the next step.
    """

    def __init__(self, state: BucketState, context: Context, result_scale: float, factor: float) -> None:
        self.state, self._context = state, context
        self.key = context.key(state.finished + 1, state.bucket.index)
        self.round = state.rounds.at(self.key.step)
        self.result_scale, self._factor = result_scale, factor
        number = len(state.bucket.tensors)
        if state.device.is_accelerator:  # our streams may not have come so far yet
            state.device.keep([grad for grad in state.grads if grad is not None])
        state.memory.grads[:] = state.grads[:] = [None] * number  # what was not fetched of the last step goes
        self._originals: list[Tensor | None] = [None] * number
        self._unclaimed = set(range(number))
        self._done = 0  # tensors that are in
        self._waiting = _Together()  # those that the codec is given together, when the last one is in
        self._offered: dict[int, Event] = {}  # how far the streams are that others were offered on
        self.nonfinite = NonFinite(state.bucket.tensors, state.device, state.fetched, context.rank)
        self.refused: BaseException | None = None
        self.error: HorovodCompressError | None = None
        self.decoding = 0.0
        self.taken = self.over = False

    @property
    def _coding(self) -> Key:
        """The key of what the method does: where ranks share hosts, their shares have bits of their own."""
        return self._context.coding_key(self.key.step, self.key.bucket) if self.state.hosted else self.key

    # ---- under the reducer's lock ----

    def claim(self, position: int) -> bool:
        """Announce a gradient; return False if there was one for this tensor in this step already."""
        first = position in self._unclaimed
        self._unclaimed.discard(position)
        return first

    def count_in(self, positions: Sequence[int], nonfinite: Counts | None) -> None:
        """Note that tensors are in, and how many values of each are not finite; None if that is not counted yet."""
        self._done += len(positions)
        if nonfinite is not None:
            self.nonfinite.add_of(positions, nonfinite)

    def count_waiting(self, counts: Tensor) -> None:
        """Note that what waited for the last tensor was handed over."""
        self.nonfinite.add_of(self._waiting.positions, counts)
        self._waiting = _Together()

    @property
    def all_claimed(self) -> bool:
        """Whether every tensor was announced."""
        return not self._unclaimed

    @property
    def all_in(self) -> bool:
        """Whether every tensor is in."""
        return self._done == len(self._originals)

    @property
    def full(self) -> bool:
        """Whether every tensor is in, and the bucket waits for its exchange."""
        return self.all_in and not self.taken and not self._waiting.positions

    @property
    def waits(self) -> bool:
        """Whether every tensor is in, and the codec has not been given those that waited for the last one."""
        return self.all_in and bool(self._waiting.positions)

    def missing(self) -> list[str]:
        """Return the tensors that have not come."""
        tensors = self.state.bucket.tensors
        return [tensors[position].name for position in sorted(self._unclaimed)]

    # ---- submit ----

    @cached_property
    def gathers(self) -> bool:
        """Whether gradients wait for the last one of the bucket as they are."""
        memory, round_ = self.state.memory, self.round
        changed = memory.withheld.any or (round_.divided and memory.divisors) or self.state.part
        return round_.waits and not changed and self._context.options.nonfinite != "zero"

    def submit(self, positions: Sequence[int], grads: Sequence[Tensor]) -> Counts | None:
        """Hand gradients to the codec; return how many values of each are not finite.

        That is a tensor on a device whose streams need not be waited for yet. A codec that takes in all tensors of a
        bucket at once is given these with the last one, by :meth:`submit_waiting`: then nothing is counted yet.
        """
        if self.gathers:
            # Nothing is done for each gradient that can be done for all. They are held until their results are fetched,
            # on a stream that follows on ours, so their memory needs no mark of our streams: that would be two calls
            # for each, and as many events when it is freed.
            for position, grad in zip(positions, grads, strict=True):
                self._originals[position] = grad
            self._waiting.positions += positions
            self.state.device.note_stream(self._waiting.streams)
            return None
        state, device = self.state, self.state.device
        device.wait_events(state.decoded)
        for position, grad in zip(positions, grads, strict=True):
            whole = grad.contiguous()
            state.grads[position], self._originals[position] = whole.view(-1) if state.part else whole, grad
            device.keep((whole, grad))
            if state.pruned:
                state.memory.grads[position] = state.pruned.take(position)
        counts = self._prepare(positions) if state.hosted is None else self._put(state.hosted, positions)
        device.record_in(self._offered)
        return counts

    def _show(self, positions: Sequence[int]) -> None:
        """Let the codec see gradients that waited, in copies if they are not contiguous."""
        grads, originals = self.state.grads, self._originals
        for position in positions:
            grad = originals[position]
            if grads[position] is None and grad is not None:
                grads[position] = whole = grad if grad.is_contiguous() else grad.contiguous()
                if whole is not grad:
                    self.state.device.keep((whole, grad))

    def _put(self, hosted: HostBucket, positions: Sequence[int]) -> Counts:
        """Show gradients to the ranks of this host; the method is handed their means, in :meth:`exchange`."""
        counts, zeroes = [], self._context.options.nonfinite == "zero"
        for position in positions:
            flat = self.state.grads[position]
            assert flat is not None
            if (count := hosted.put(position, flat)) and zeroes:
                self.nonfinite.set_zero(position, flat, ~flat.isfinite())
                count = hosted.put(position, flat)
            counts.append(count)
        return counts

    def _prepare(self, positions: Sequence[int]) -> Counts:
        """Hand gradients, or the means of a host, to the codec, or let them wait for the last one."""
        memory, round_ = self.state.memory, self.round
        for position in positions if memory.withheld.any or (round_.divided and memory.divisors) else ():
            flat = round_.work.grad(position)
            if memory.withheld.any:
                memory.withheld.take(position, flat, round_.wire)
            if round_.divided and position in memory.divisors:
                flat.div_(memory.divisors[position])
        if self._context.options.nonfinite == "zero":
            return [count for position in positions for count in self._submit_zeroed(position)]
        if round_.waits:
            self._waiting.positions += positions
            return [0] * len(positions)
        return self._submit_now(positions)

    def _submit_now(self, positions: Sequence[int]) -> Counts:
        """Hand gradients over, again where something of what is kept for them was found to be spoilt."""
        counts = self.round.submit(positions, self._coding)
        if self.state.device.is_accelerator or not any(counts):
            return counts
        found = list(counts)
        for place, position in enumerate(positions):
            if found[place] and self.state.drop_spoilt(position):
                (found[place],) = self.round.submit([position], self._coding)
        return found

    def _submit_zeroed(self, position: int) -> Counts:
        """Hand a gradient over, again with zeros where its values were found to be spoilt."""
        round_, flat, key, set_zero = self.round, self.round.work.grad(position), self._coding, self.nonfinite.set_zero
        most = _HUGE if torch.finfo(flat.dtype).max > _HUGE else torch.inf
        if round_.codec.counts_late and bool((spoilt := ~(flat.abs() < most)).any()):  # NaN is not less either
            set_zero(position, flat, spoilt)
        counts = self._submit_now([position])
        if counts[0]:  # in this order: on a GPU the count is a tensor, and to ask it waits
            set_zero(position, flat, ~flat.isfinite())
            counts = round_.submit([position], key)
        if counts[0]:  # finite, but too large for this method
            set_zero(position, flat, flat.abs() >= min(_HUGE, torch.finfo(flat.dtype).max))
            counts = round_.submit([position], key)
        return counts

    def submit_waiting(self, first: Callable[[Sequence[int], Sequence[Tensor]], None] | None = None) -> Tensor:
        """Hand over all gradients that waited, after their streams and after `first` has seen them; return counts."""
        device = self.state.device
        device.wait_events(self.state.decoded, *self._offered.values())
        device.follow(self._waiting.streams)
        positions = self._waiting.positions
        positions.sort()  # counts come in this order
        self._show(positions)
        if first and self.gathers:
            first(positions, self.round.work.grads_at(positions))
        counts = self.round.submit_all(positions, self._coding)
        device.record_in(self._offered)
        return counts

    def leave_out(self, position: int, grad: Tensor) -> None:
        """Take a gradient that is not exchanged in this step, on any rank; its result is 0."""
        self.state.device.wait_events(self.state.decoded)
        self._originals[position] = grad.zero_()
        self.state.device.keep((grad,))
        self.state.device.record_in(self._offered)

    # ---- exchange ----

    def exchange(self, decode: Callable[[Sequence[Part]], None], deadline: Deadline) -> NonFiniteCount:
        """Exchange the bucket with all other ranks: its preludes, then its payload.

        Every rank has the complete count of values that are not finite after a prelude, so all leave out what follows,
        or none does.

        Args:
            decode: called with the parts of the result that can be decoded while the exchange goes on.
            deadline: one for all of it.

        Returns:
            The count over all ranks.
        """
        hosted = self.state.hosted
        if hosted is None:
            return self._exchange(decode, deadline)
        self._average(hosted, deadline)
        bad = self._exchange(nothing, deadline)  # parts are not decoded before it is known that all shares are good
        self._context.recorder.note(self.key.step, self.key.bucket, "agree")
        with self._context.metrics.timed("exchange", where=(self.key.step, self.state.bucket, "host agrees")):
            return hosted.agree(bad, deadline)

    def _average(self, hosted: HostBucket, deadline: Deadline) -> None:
        """Hand the codec the means of this rank's host, of what this rank owns."""
        self._context.recorder.note(self.key.step, self.key.bucket, "host")
        where, found = (self.key.step, self.state.bucket, "host"), NonFiniteCount()
        with self._context.metrics.timed("exchange", where=where):
            bad = hosted.meet(self.nonfinite.bad, deadline)
        with self._context.metrics.timed("offer", where=where):
            positions = [position for position, grad in enumerate(hosted.grads) if grad is not None]
            for position in positions:
                self.state.memory.grads[position] = hosted.average(position)
            for count in self._prepare(positions):
                if count:
                    found = found.plus(NonFiniteCount(int(count), self._context.rank + 1))
        self.nonfinite.take_over(bad, found)

    def _exchange(self, decode: Callable[[Sequence[Part]], None], deadline: Deadline) -> NonFiniteCount:
        context, bucket, round_, step = self._context, self.state.bucket, self.round, self.key.step
        key, among = self._coding, context.between if self.state.hosted else None
        for number, prelude in enumerate(round_.preludes):
            context.recorder.note(step, bucket.index, "prelude", number)
            with context.metrics.timed("encode", where=(step, bucket, f"encode for prelude {number}")):
                self.nonfinite.add(round_.before(number, key))
            exchange = context.exchange(bucket.index, f"prelude {number}", self.nonfinite.bad, deadline, among)
            with context.metrics.timed("exchange", where=(step, bucket, f"prelude {number}")):
                bad = prelude.run(exchange, round_.reduction(key))
            context.metrics.sent(exchange.bytes_sent, exact=round_.exact)
            if bad.count:
                return bad
        context.recorder.note(step, bucket.index, "encode")
        with context.metrics.timed("encode", where=(step, bucket)):
            self.nonfinite.add(round_.encode(key))
        exchange = context.exchange(bucket.index, round_.label, self.nonfinite.bad, deadline, among)
        encoding = partial(context.metrics.timed, "encode", "exchange", (step, bucket))
        with context.metrics.timed("exchange", where=(step, bucket)):
            bad = round_.exchange(exchange, key, encoding, decode)
        context.metrics.sent(exchange.bytes_sent, exact=round_.exact)
        return bad

    def take_over(self, deadline: Deadline) -> None:
        """Let this thread go on with a full bucket: after its offers, and with their counts as numbers.

        Raises:
            ExchangeError: the device did not come to its counts before the deadline.
        """
        self.state.device.wait_events(*self._offered.values())
        self.nonfinite.read(deadline)

    @property
    def empty(self) -> bool:
        """Whether no gradient of the bucket is exchanged: sparse ones are somebody else's."""
        return all(grad is None for grad in self.state.grads)

    # ---- decode ----

    def decode(self, parts: Sequence[Part]) -> None:
        """Decode parts of the result, over the gradients."""
        self._context.recorder.note(self.key.step, self.key.bucket, "decode")
        began = time.perf_counter()
        with self._context.metrics.timed("decode", where=(self.key.step, self.state.bucket)):
            self.round.decode(parts, self._coding, self.result_scale * self._factor)
        self.decoding += time.perf_counter() - began

    def complete(self, bad: NonFiniteCount) -> None:
        """Decode what was not decoded part by part, and let what the round leaves be what the next one reads.

        Args:
            bad: over all ranks; if there are any, no rank decodes the bucket.
        """
        state, memory, round_ = self.state, self.state.memory, self.round
        self._context.metrics.nonfinite += bad.count + bad.zeroed
        if bad.count:
            self._give_nan(bad)
            return
        if state.hosted or not round_.parts:
            self.decode(round_.whole())
        round_.keep()
        state.rounds.note_emptied()
        if memory.withheld.any:
            for position in round_.work.present():
                kept = [kept[memory.span(position)] for kept in memory.state.values()]
                memory.withheld.keep(position, round_.work.grad(position), kept, round_.wire)
        for position in round_.work.present() if state.pruned else ():
            state.pruned.deliver(position, round_.work.grad(position))  # type: ignore[union-attr]
        if state.hosted:
            self._context.recorder.note(self.key.step, self.key.bucket, "deliver")
            with self._context.progress.delivering(), self._context.metrics.timed("decode"):
                state.hosted.deliver(self.key.step, self._context.deadline())

    def _give_nan(self, bad: NonFiniteCount) -> None:
        """Give every rank NaN, and leave what is kept as it is, so that a skipped step leaves no trace."""
        if self._context.options.nonfinite == "raise":
            names = self.nonfinite.names
            where = f"; on this rank in {', '.join(names)}" if names else ""
            self.error = NonFiniteError(
                f"rank {self._context.rank}: {bad.count} gradient values of bucket {self.key.bucket} are not finite in "
                f"step {self.key.step}, the first on rank {bad.origin - 1}{where}; lower the learning rate, clip, or "
                'choose nonfinite="propagate" with a gradient scaler'
            )
        for position, grad in enumerate(self.state.grads):
            if grad is not None:
                grad.fill_(float("nan"))
                self.state.drop_spoilt(position)  # where an offer did not tell whose value it was

    def write_back(self) -> None:
        """Copy results to gradients that are not contiguous; all others were overwritten."""
        for taken, grad in zip(self.state.grads, self._originals, strict=True):
            if taken is grad or taken is None or grad is None or taken.data_ptr() == grad.data_ptr():
                continue
            grad.copy_(taken.view(grad.shape))

    # ---- take ----

    def take(self, position: int) -> Tensor:
        """Return one result and forget it."""
        grad = self._originals[position]
        assert grad is not None
        self.state.device.wait_events(self.state.decoded)
        self.state.grads[position] = self._originals[position] = None
        return grad
