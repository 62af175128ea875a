"""The second part of a gradient's way: a full bucket is encoded and exchanged.

One thread does this, in the order of the plan, each bucket as soon as it is full, while backward still runs.
"""

from __future__ import annotations

import threading
import time
from functools import partial

import torch

from ..exchange.device import Deadline
from ..exchange.wire import NonFiniteCount
from ..ops.keys import Key
from .agreement.uneven import Uneven
from .bucket.round import Round
from .bucket.state import BucketState
from .buckets import Buckets
from .context import Context
from .decoding import Decoding
from .failure import Failure
from .norms import Norms
from .start import Start
from .verification import Verification

_LOOK_SECONDS = 1.0


class Exchanging:
    """The exchange thread. It alone sends and receives, so all ranks use their connections in the same order."""

    def __init__(
        self,
        context: Context,
        buckets: Buckets,
        failure: Failure,
        agreed: tuple[Start, Uneven, Verification],
        decoding: Decoding,
        norms: Norms,
    ) -> None:
        self._context, self._buckets, self._failure, self._decoding = context, buckets, failure, decoding
        self._norms = norms
        self._start, self._uneven, self._verification = agreed
        self._thread = threading.Thread(target=self._run, name="hvc-exchange", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def alive(self) -> bool:
        return self._thread.is_alive()

    def waits(self) -> bool:
        """Return whether another thread asks while this one is still in an exchange."""
        return self.alive() and self._thread is not threading.current_thread()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, unless it is the one that asks."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._context.devices.on("exchanging"):
                while self._one_step():
                    pass
        except BaseException as error:  # noqa: BLE001  the training thread waits for what comes of it
            self._failure.end(error)

    # ---- one step ----

    def _one_step(self) -> bool:
        """Exchange every bucket once; return False when the reducer is closed."""
        for state in self._buckets:
            if not self._await_full(state):
                return not self._failure.closing  # with other buckets, if they were changed
            step = self._context.progress.step
            if self._start.due:
                self._start.agree()
            began = time.perf_counter()
            self._exchange(state)
            if self._buckets.is_last(state):
                self._norms.exchange()
                self._end_step(step)
            self._decoding.deliver_later(state, step, began)
        return bool(len(self._buckets))

    def _await_full(self, state: BucketState) -> bool:
        """Wait until a bucket is full and take it; return False when the reducer is closed, or the bucket is gone."""
        failure, progress, changed = self._failure, self._context.progress, self._context.changed

        def ready() -> bool:
            return state.offers.full or failure.closing or bool(failure.pending()) or state not in self._buckets

        progress.awaits(state.bucket.index)
        while True:
            with changed:
                if changed.wait_for(ready, _LOOK_SECONDS):
                    if error := failure.pending():
                        raise error
                    if failure.closing or state not in self._buckets:
                        return False
                    state.offers.taken = True
                    progress.exchanges()
                    return True
            self._uneven.check(progress.step)  # without the lock: it asks the other ranks

    def _end_step(self, step: int) -> None:
        if self._verification.due():
            self._decoding.drain()
            if self._failure.broken:
                raise self._failure.broken
            self._verification.compare_results()
        self._verification.compare_weights(step)
        self._context.progress.step += 1
        self._context.metrics.end_step()

    # ---- one bucket ----

    def _exchange(self, state: BucketState) -> None:
        """Run a bucket's exchange; its result is decoded on the decoding thread, as it arrives."""
        context, bucket = self._context, state.bucket
        if all(grad is None for grad in state.memory.grads):  # sparse gradients only, which Horovod reduces itself
            self._verification.take(state)
            return
        key = context.key(state.finished + 1, bucket.index)
        round_, deadline = state.round(context.progress.step), Deadline(context.options.longest_seconds)
        state.take_over(deadline)
        began = time.perf_counter()
        bad = self._preludes(state, round_, key, deadline)
        if not bad.count:
            bad = self._payload(state, round_, key, deadline)
        if context.watch and bad.count:
            context.watch.spoil()  # the round was cut short
        elif context.watch:
            context.watch.exchanged(bucket.index, time.perf_counter() - began)
        self._norms.note(state, bad)
        context.metrics.bytes_dense += 8 * bucket.count * (context.world - 1) / context.world
        self._decoding.complete_later(state, round_, key, bad, self._verification.due())

    def _preludes(self, state: BucketState, round_: Round, key: Key, deadline: Deadline) -> NonFiniteCount:
        """Run the exchanges before the payload's; return the non-finite count over all ranks.

        Every rank has the same count after a prelude, so all leave out what follows, or none.
        """
        context, bucket, bad = self._context, state.bucket, NonFiniteCount()
        for number, prelude in enumerate(round_.preludes):
            context.recorder.note(context.progress.step, bucket.index, "prelude", number)
            with context.metrics.timed("encode", where=(key.step, bucket, f"encode for prelude {number}")):
                state.nonfinite.add(round_.before(number, key))
            exchange = context.exchange(bucket.index, f"prelude {number}", state.nonfinite.bad, deadline)
            with context.metrics.timed("exchange", where=(key.step, bucket, f"prelude {number}")):
                bad = prelude.run(exchange, round_.reduction(key))
            context.metrics.sent(exchange.bytes_sent, exact=round_.exact)
            if bad.count:
                break
        return bad

    def _payload(self, state: BucketState, round_: Round, key: Key, deadline: Deadline) -> NonFiniteCount:
        """Encode and exchange the payload; return the non-finite count over all ranks."""
        context, where = self._context, (key.step, state.bucket)
        context.recorder.note(context.progress.step, state.bucket.index, "encode")
        with context.metrics.timed("encode", where=where):
            state.nonfinite.add(round_.encode(key))
        exchange = context.exchange(state.bucket.index, round_.label, state.nonfinite.bad, deadline)
        encoding = partial(context.metrics.timed, "encode", "exchange", where)
        ready = partial(self._decoding.decode_later, state, round_, key)
        with context.metrics.timed("exchange", where=where):
            bad = round_.exchange(exchange, key, encoding, ready)
        context.metrics.sent(exchange.bytes_sent, exact=round_.exact)
        return bad

    # ---- measurements ----

    def time(self, state: BucketState) -> float:
        """Exchange whatever a bucket's payload holds, on this thread, and return the seconds; between two steps."""
        context = self._context
        key = context.key(state.finished + 1, state.bucket.index)
        round_ = state.round(key.step)
        exchange = context.exchange(state.bucket.index, round_.label, NonFiniteCount())
        began = time.perf_counter()
        with torch.no_grad(), state.device.exchanging():
            state.device.wait_events(state.decoded)
            round_.exchange(exchange, key)
            event = state.device.record_event()  # payloads are still copied back, where the next step encodes its own
            state.device.wait(event, exchange.deadline)
            state.decoded = event
        seconds = time.perf_counter() - began
        context.metrics.bytes_sent += exchange.bytes_sent
        return seconds
