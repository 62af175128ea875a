"""The offering, exchange and decoding threads: they let turns be filled, exchanged and finished.

On the CPU the offering thread takes gradients in; on a device the training thread queues that. Small gradients wait
until there are enough of them, and go to the codec in one call. So large ones are taken in one by one, each as it
comes, and hundreds of small ones with a few calls: each call gives up the interpreter's lock and has to get it back
from the backward pass, which takes longer than the work on a small gradient. Who goes together depends on the order of
the backward pass alone, not on how fast a thread is: what follows from it is found once, and not in every step.

The exchange thread alone sends and receives, in the order of the plan, so all ranks use their connections alike. It
takes each bucket as soon as it is full, while backward still runs. The decoding thread is another one as the ring has
to pass each segment on at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.work import Counts
from ..errors import ExchangeError, HorovodCompressError
from ..exchange.wire import NonFiniteCount
from .agreement.differences import explained
from .agreement.notes import Uneven
from .buckets import Buckets, BucketState
from .comparison import Start, Verification
from .context import Context
from .failure import Failure
from .norms import Norms
from .turn import Turn

_LOOK_SECONDS = 1.0
#: Gradients wait until so many bytes have come, of whatever buckets, or for the last one of theirs.
ENOUGH = 1 << 20

_log = logging.getLogger("horovod_compress")


class Offered(NamedTuple):
    """A gradient on its way to the codec.

    Attributes:
        position: of its tensor in the bucket.
    """

    turn: Turn
    position: int
    grad: Tensor


class Offering:
    """Takes gradients in; those who hand them over do so one after the other.

    Attributes:
        worker: the thread that does so.
    """

    def __init__(self, context: Context, failure: Failure, norms: Norms) -> None:
        self._context, self._failure, self._norms = context, failure, norms
        self._batch: list[Offered] = []  # what has come, and is to be taken in together
        self._nbytes = 0  # of that
        self.worker = failure.worker("hvc-offer", "taking in gradients")

    def take(self, offered: Offered) -> None:
        """Take one gradient in, or have it taken in."""
        turn = offered.turn
        if turn.gathers and not self._context.metrics.trace:
            self._let_wait(offered)
            return
        if turn.state.device.is_accelerator:  # queued on the stream that the gradient comes from
            self._take_in([offered])
            return
        self._batch.append(offered)
        self._nbytes += offered.grad.nbytes
        if self._nbytes >= ENOUGH or turn.all_claimed:
            self._end_batch()

    def leave_out(self, turn: Turn, position: int) -> None:
        """Count a tensor in that was announced, and of which nothing comes: others need not wait for it."""
        if turn.all_claimed and self._batch:
            self._end_batch()
        self.count_in(turn, [position], [0])

    def forget(self) -> None:
        """Forget what has come of a step that never comes about."""
        self._batch, self._nbytes = [], 0

    def _end_batch(self) -> None:
        batch = self._batch
        self.forget()
        self.worker.put(partial(self._take_batch_in, batch))

    def _take_batch_in(self, batch: Sequence[Offered]) -> None:
        """Take in what has come together, on the thread for it."""
        by_turn: dict[int, list[Offered]] = {}
        for offered in batch:
            by_turn.setdefault(id(offered.turn), []).append(offered)
        for group in by_turn.values():
            if not (self._failure.closing or group[0].turn.over):  # it is of a step that never came about
                self._take_in_later(group)

    def _take_in_later(self, offered: Sequence[Offered]) -> None:
        """Take gradients of one turn in, where an error has no traceback that leads to them."""
        try:
            self._take_in(offered)
        except HorovodCompressError:
            raise
        except Exception as error:
            turn = offered[0].turn
            names = ", ".join(turn.state.bucket.tensors[each.position].name for each in offered[:3])
            whose = f"the gradient of {names}" if len(offered) == 1 else f"{len(offered)} gradients, of {names}"
            raise ExchangeError(
                f"rank {self._context.rank}: {whose}, in bucket {turn.key.bucket} of step {turn.key.step}, could not "
                f"be processed: {type(error).__name__}: {error}; restart the job from a checkpoint"
            ) from error

    def _let_wait(self, offered: Offered) -> None:
        """Let a gradient wait for the last one of its bucket: nothing is done yet that would take time to note."""
        context, (turn, position, grad) = self._context, offered
        context.recorder.note(turn.key.step, turn.key.bucket, "offer")
        turn.submit([position], [grad])
        self.count_in(turn, [position], None)

    def _take_in(self, offered: Sequence[Offered]) -> None:
        """Take gradients of one turn in."""
        context, turn = self._context, offered[0].turn
        bucket, positions = turn.state.bucket, [each.position for each in offered]
        context.recorder.note(turn.key.step, turn.key.bucket, "offer")
        names = bucket.tensors[positions[0]].name + (f" and {len(offered) - 1} more" if len(offered) > 1 else "")
        with context.metrics.timed("offer", where=(turn.key.step, bucket, names)), torch.no_grad():
            grads = [each.grad for each in offered]
            if not turn.gathers:  # else all of a bucket together
                self._norms.fold(turn, positions, grads)
            counts = turn.submit(positions, grads)
        self.count_in(turn, positions, counts)

    def count_in(self, turn: Turn, positions: Sequence[int], nonfinite: Counts | None) -> None:
        """Note that tensors are in, as the last thing: another step may begin then.

        Args:
            nonfinite: how many of the values of each are not finite; None if that is not counted yet.
        """
        context = self._context
        with context.changed:
            turn.count_in(positions, nonfinite)
            if not turn.all_in:
                return
            is_last = turn.waits
            if turn.full:
                context.changed.notify_all()
        if not is_last:
            return
        where = (turn.key.step, turn.state.bucket, "all that waited")
        with context.metrics.timed("offer", where=where), torch.no_grad(), turn.state.device.offering():
            try:
                counts = turn.submit_waiting(partial(self._norms.fold, turn))
            except BaseException as error:
                turn.refused = error  # for whoever waits for the bucket all the same
                raise
        with context.changed:
            turn.count_waiting(counts)
            context.changed.notify_all()


class Exchanging:
    """Exchanges, decodes and delivers turns.

    Args:
        turns: those under way, by bucket; see :class:`.reducer.Reducer`.
    """

    def __init__(
        self,
        context: Context,
        buckets: Buckets,
        turns: dict[int, Turn],
        failure: Failure,
        agreed: tuple[Start, Uneven, Verification],
        norms: Norms,
    ) -> None:
        self._context, self._buckets, self._turns, self._failure = context, buckets, turns, failure
        self._start, self._uneven, self._verification = agreed
        self._norms = norms
        self._complete_later: list[tuple[Turn, float]] = []  # whose results wait for the end of their step
        self._told_of_dropped = False
        self.decoding = failure.worker("hvc-decode", "decoding", lambda: context.devices.on("decoding"))
        self.thread = threading.Thread(target=self._run, name="hvc-exchange", daemon=True)

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, unless it is the one that asks."""
        if self.thread is not threading.current_thread():
            self.thread.join(seconds)

    # ---- the exchange thread ----

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._context.devices.on("exchanging"):
                while self._one_step():
                    pass
        except BaseException as error:  # noqa: BLE001  the training thread waits for what comes of it
            self._failure.end(error)
        finally:
            self._context.progress.ends()

    def _one_step(self) -> bool:
        """Exchange every bucket once; return False when the reducer is closed."""
        for state in self._buckets:
            turn = self._await_full(state)
            if turn is None:
                return not self._failure.closing  # with other buckets, if they were changed
            if self._start.due:
                self._start.agree()
            began = time.perf_counter()
            if turn.empty:
                self._verification.take(state)
            else:
                self._exchange(turn)
            if self._buckets.is_last(state):
                self._norms.exchange(self._await_decoded)
                self._end_step(turn.key.step)
            self.decoding.put(partial(self._deliver, turn, began))
        return bool(len(self._buckets))

    def _await_full(self, state: BucketState) -> Turn | None:
        """Wait until a bucket is full and take it; return None when the reducer is closed, or the bucket is gone."""
        failure, progress, changed = self._failure, self._context.progress, self._context.changed
        number = state.bucket.index

        def full() -> Turn | None:
            turn = self._turns.get(number)
            return turn if turn and turn.full else None

        def ready() -> bool:
            ended = failure.closing or failure.broken or failure.flooded
            return bool(ended or full()) or state not in self._buckets

        progress.awaits(number)
        while True:
            with changed:
                if changed.wait_for(ready, _LOOK_SECONDS):
                    if failure.broken or failure.flooded:
                        raise failure.pending()
                    if failure.closing or state not in self._buckets:
                        return None
                    turn = full()
                    assert turn is not None
                    turn.taken = True
                    progress.exchanges()
                    return turn
            self._uneven.check(progress.step)  # without the lock: it asks the other ranks

    def _exchange(self, turn: Turn) -> None:
        """Let a bucket be exchanged; its result is decoded on the decoding thread, as it arrives."""
        context, bucket, deadline = self._context, turn.state.bucket, self._context.deadline()
        turn.take_over(deadline)
        began = time.perf_counter()  # what is still queued of the backward pass is none of the exchange
        bad = turn.exchange(lambda parts: self._decode_later(turn, partial(turn.decode, parts)), deadline)
        if context.watch and bad.count:
            context.watch.spoil()  # the round was cut short
        elif context.watch:
            context.watch.exchanged(bucket.index, time.perf_counter() - began)
        self._norms.note(turn, bad)
        context.metrics.bytes_dense += 8 * bucket.count * (context.world - 1) / context.world
        self._decode_later(turn, partial(self._complete, turn, bad, self._context.verifies()))

    def _end_step(self, step: int) -> None:
        if self._context.verifies():
            self._await_decoded()
            self._verification.compare_results()
        if self._verification.weights:
            self._verification.compare_weights(step)
        self._context.progress.step += 1
        self._context.metrics.end_step()

    def _await_decoded(self) -> None:
        self.decoding.drain()
        if self._failure.broken:
            raise self._failure.broken

    def _decode_later(self, turn: Turn, task: Callable[[], None]) -> None:
        """Give the decoding thread a task that follows on what this thread has queued."""
        device = turn.state.device
        event = device.record_event()

        def then() -> None:
            device.wait_events(event)
            task()

        self.decoding.put(task if event is None else then)

    # ---- the decoding thread ----

    def _complete(self, turn: Turn, bad: NonFiniteCount, verifying: bool) -> None:
        """Let a turn have its results, and look at them.

        Args:
            bad: values that are not finite, over all ranks.
            verifying: results are compared across ranks at the end of the step.
        """
        state, before, began = turn.state, turn.decoding, time.perf_counter()
        turn.complete(bad)
        if not bad.count:
            self._norms.decoded(turn)
        with self._context.metrics.timed("decode"):
            turn.write_back()
        if (watch := self._context.watch) and not bad.count:
            state.device.wait(state.device.record_event(), self._context.deadline())  # until then it is only queued
            watch.decoded(turn.key.bucket, before + time.perf_counter() - began)
        if verifying:
            self._verification.take(state)
        if state.dropped and not self._told_of_dropped:
            self._told_of_dropped = True
            name, number = next(iter(state.dropped.items()))
            text = (
                f"rank {self._context.rank}: {number} value(s) kept for {name} were not finite, or above 7.9e28, and "
                'have been dropped. If a gradient was not finite before (stats()["nonfinite"] counts these), weights '
                'may not be either: restart the job from a checkpoint, with nonfinite="raise" to find the first. If '
                "none was, check what else writes to the compression's state, or this host's memory"
            )
            _log.warning("%s", explained(text, self._failure.ranks_in_words))

    def _deliver(self, turn: Turn, began: float) -> None:
        """Hand results to the training thread; where norms are known at the end of the step only, all of them then."""
        if not self._buckets.is_last(turn.state):
            if self._norms.holds_results:
                self._complete_later.append((turn, began))
            else:
                self._hand_over(turn, began, last=False)
            return
        self._norms.settle()
        later, self._complete_later = self._complete_later, []
        for earlier, since in later:
            self._hand_over(earlier, since, last=False)
        self._hand_over(turn, began, last=True)

    def _hand_over(self, turn: Turn, began: float, *, last: bool) -> None:
        """Let the training thread have results, when it is noted how long they took; it may begin another step then."""
        context, step, ended = self._context, turn.key.step, time.perf_counter()
        context.overlap.delivered(began, ended)
        found = context.overlap.finish(step) if last else None
        if trace := context.metrics.trace:
            trace("result", began, ended, step, turn.state.bucket)
            if last:
                trace("step", began, ended, step, None, found)
        with context.changed:
            context.progress.finished = (step, turn.key.bucket)
            context.progress.done += last
            turn.state.finish(step)
            turn.over = True
            context.changed.notify_all()

    # ---- measurements ----

    def time(self, state: BucketState) -> float:
        """Exchange whatever a bucket's payload holds, on this thread, and return the seconds; between two steps."""
        context = self._context
        key = context.coding_key(state.finished + 1, state.bucket.index)
        round_ = state.round(key.step)
        exchange = context.exchange(state.bucket.index, round_.label, NonFiniteCount(), among=context.between)
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
