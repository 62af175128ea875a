"""The third part of a gradient's way: consensus bytes become results, written over the gradients.

A thread of its own does this, as the ring has to pass each segment on at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

from ..codecs.work import Part
from ..errors import NonFiniteError
from ..exchange.device import Deadline, Device, Event
from ..exchange.wire import NonFiniteCount
from ..ops.keys import Key
from .bucket.round import Round
from .bucket.state import BucketState
from .buckets import Buckets
from .context import Context
from .failure import Failure
from .norms import Norms
from .verification import Verification

_log = logging.getLogger("horovod_compress")


class Decoding:
    """Decodes results in the order in which they are exchanged, and hands them over."""

    def __init__(
        self, context: Context, buckets: Buckets, failure: Failure, verification: Verification, norms: Norms
    ) -> None:
        self._context, self._buckets, self._failure = context, buckets, failure
        self._verification, self._norms = verification, norms
        self._held: list[tuple[BucketState, int, float]] = []  # results that wait for the end of their step
        self._told_of_dropped = False
        self.worker = failure.worker("hvc-decode", "decoding", lambda: context.devices.on("decoding"))

    # ---- the exchange thread ----

    def decode_later(self, state: BucketState, round_: Round, key: Key, parts: list[Part]) -> None:
        """Have parts of a result decoded."""
        self._put(state, partial(self._decode_parts, state, round_, key, parts))

    def complete_later(self, state: BucketState, round_: Round, key: Key, bad: NonFiniteCount, verifying: bool) -> None:
        """Have what is left of a result decoded.

        Args:
            bad: over all ranks; if there are any, no rank decodes the bucket.
            verifying: the result is compared across ranks at the end of the step.
        """
        self._put(state, partial(self._complete, state, round_, key, bad, verifying))

    def deliver_later(self, state: BucketState, step: int, began: float) -> None:
        """Have a result handed over to the training thread.

        Args:
            began: when its exchange did.
        """
        self.worker.put(partial(self._deliver, state, step, began))

    def drain(self) -> None:
        """Wait until all of this is done."""
        self.worker.drain()

    def _put(self, state: BucketState, task: Callable[[], None]) -> None:
        """Give the decoding thread a task that follows on what this thread has queued."""
        event = state.device.record_event()
        self.worker.put(task if event is None else partial(_after, state.device, event, task))

    # ---- the decoding thread ----

    def _decode_parts(self, state: BucketState, round_: Round, key: Key, parts: list[Part]) -> None:
        result_scale = self._result_scale_of(state) * self._norms.factor(state)
        self._context.recorder.note(key.step, key.bucket, "decode")
        began = time.perf_counter()
        with self._context.metrics.timed("decode", where=(key.step, state.bucket)):
            round_.decode(parts, key, result_scale)
        state.decoding += time.perf_counter() - began

    def _complete(self, state: BucketState, round_: Round, key: Key, bad: NonFiniteCount, verifying: bool) -> None:
        """Decode what was not decoded part by part, and finish the result."""
        began = time.perf_counter()
        self._context.metrics.nonfinite += bad.count + bad.zeroed
        if bad.count:
            self._not_finite(state, bad, key.step)
        else:
            if not round_.parts:
                self._decode(state, round_, key)
            state.keep(round_)
            self._norms.decoded(state)
        with self._context.metrics.timed("decode"):
            state.write_back()
        if (watch := self._context.watch) and not bad.count:
            deadline = Deadline(self._context.options.longest_seconds)
            state.device.wait(state.device.record_event(), deadline)  # until then it is only queued
            watch.decoded(key.bucket, state.decoding + time.perf_counter() - began)
        if verifying:
            self._verification.take(state)
        if state.nonfinite.dropped and not self._told_of_dropped:
            self._tell_of_dropped(state)

    def _decode(self, state: BucketState, round_: Round, key: Key) -> None:
        result_scale = self._result_scale_of(state) * self._norms.factor(state)
        self._context.recorder.note(key.step, key.bucket, "decode")
        with self._context.metrics.timed("decode", where=(key.step, state.bucket)):
            round_.decode(round_.whole(), key, result_scale)

    def _result_scale_of(self, state: BucketState) -> float:
        """Return a bucket's result scale. A mean multiplied afterwards would be rounded once more."""
        failure, changed = self._failure, self._context.changed
        with changed:
            while state.result_scale is None:
                state.result_scale = 1.0 if failure.closing or failure.broken else self._context.result_scale
                if state.result_scale is None:
                    changed.wait()
            return state.result_scale

    def _not_finite(self, state: BucketState, bad: NonFiniteCount, step: int) -> None:
        """Give every rank NaN and keep the residual, so that a skipped step leaves no trace."""
        if self._context.options.nonfinite == "raise":
            names = state.nonfinite.names
            where = f"; on this rank in {', '.join(names)}" if names else ""
            state.error = NonFiniteError(
                f"rank {self._context.rank}: {bad.count} gradient values of bucket {state.bucket.index} are "
                f"not finite in step {step}, the first on rank {bad.origin - 1}{where}; lower the "
                f'learning rate, clip, or choose nonfinite="propagate" with a gradient scaler'
            )
        for position, grad in enumerate(state.memory.grads):
            if grad is not None:
                grad.fill_(float("nan"))
                state.drop_spoilt(position)  # where an offer did not tell whose value it was

    def _tell_of_dropped(self, state: BucketState) -> None:
        self._told_of_dropped = True
        name, number = next(iter(state.nonfinite.dropped.items()))
        _log.warning(
            "rank %d: %d value(s) kept for %s were not finite and have been dropped; no step of this method produces "
            "them: check what else writes to the compression's state, or this host's memory",
            *(self._context.rank, number, name),
        )

    def _deliver(self, state: BucketState, step: int, began: float) -> None:
        """Hand a result over; where norms are known at the end of the step only, all of them then."""
        is_last = self._buckets.is_last(state)
        if self._norms.holds_results and not is_last:
            self._held.append((state, step, began))
            return
        if is_last:
            self._norms.settle()
            held, self._held = self._held, []
            for earlier in held:
                self._hand_over(*earlier)
        self._hand_over(state, step, began)

    def _hand_over(self, state: BucketState, step: int, began: float) -> None:
        progress, changed = self._context.progress, self._context.changed
        self._account(state, step, began, time.perf_counter())
        with changed:
            progress.finished = (step, state.bucket.index)
            progress.done += self._buckets.is_last(state)
            state.finish(step)
            changed.notify_all()

    def _account(self, state: BucketState, step: int, began: float, ended: float) -> None:
        """Take note of when a bucket was exchanged and decoded; before it can be offered to again."""
        trace, overlap = self._context.metrics.trace, self._context.overlap
        overlap.delivered(began, ended)
        if trace:
            trace("result", began, ended, step, state.bucket)
        if self._buckets.is_last(state):
            found = overlap.finish(step)
            if trace:
                trace("step", began, ended, step, None, found)


def _after(where: Device, event: Event, task: Callable[[], None]) -> None:
    """Do a task whose work on a device follows on an event."""
    where.wait_events(event)
    task()
