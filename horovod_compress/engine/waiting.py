"""The last part of a gradient's way: the training thread waits for results, and learns what keeps them from coming."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from ..errors import ConfigError, ExchangeError, MismatchError
from .agreement.notes import Uneven
from .bucket.state import BucketState
from .buckets import Buckets
from .comparison import Start
from .context import Context
from .exchanging import Exchanging
from .failure import Failure

_LOOK_SECONDS = 1.0


class Waiting:
    """Waits for results, and for the end of a step."""

    def __init__(
        self,
        context: Context,
        buckets: Buckets,
        failure: Failure,
        agreed: tuple[Start, Uneven],
        exchanging: Exchanging,
    ) -> None:
        self._context, self._buckets, self._failure, self._exchanging = context, buckets, failure, exchanging
        self._start, self._uneven = agreed

    def result(self, index: int, step: int, result_scale: float | None) -> Tensor:
        """Wait for one result and return it. See :meth:`Reducer.result`."""
        context = self._context
        state, position = self._buckets.where(index)
        where = (step, state.bucket) if state.finished < step else ()
        with context.metrics.timed("wait", where=where):
            if context.result_scale is None:
                with context.changed:
                    context.result_scale = 1.0 if result_scale is None else result_scale
                    context.changed.notify_all()
            self._await(lambda: state.finished >= step, step)
        if state.error:
            self.settle(step)  # so that the next step can begin
            raise state.error
        grad = state.take(position)
        if result_scale is not None and result_scale != state.result_scale:
            grad.mul_(result_scale / (state.result_scale or 1.0))
            context.result_scale = result_scale
        return grad

    def settle(self, step: int) -> None:
        """Wait until a step that was offered whole is finished."""
        self._await(lambda: all(state.finished >= step for state in self._buckets), step)

    def wait_idle(self, seconds: float) -> bool:
        """Wait until the exchange thread has finished what was offered; return whether it has."""
        end = time.monotonic() + seconds
        while not self._buckets.idle() and time.monotonic() < end and not self._failure.failed():
            time.sleep(0.001)
        self._failure.raise_if_failed()
        return self._buckets.idle()

    def _await(self, ready: Callable[[], bool], step: int) -> None:
        """Wait for something of a step, and raise what keeps it from coming."""
        changed, failure = self._context.changed, self._failure
        while True:
            with changed:
                if changed.wait_for(lambda: ready() or failure.failed(), _LOOK_SECONDS):
                    break
                self._check_coming(step)
                done = self._context.progress.done  # without this step, which may end at any moment
            self._uneven.waits(step)  # without the lock: it asks the other ranks
            self._check_start(done)
        failure.raise_if_failed()

    def _check_start(self, done: int) -> None:
        """Stop all ranks if others wait for an answer that this one will not give."""
        try:
            self._start.check(done)
        except MismatchError as error:
            self._failure.report("waiting", error)

    def _check_coming(self, step: int) -> None:
        """Raise what keeps a step from ever coming to an end."""
        rank = self._context.rank
        for state in self._buckets:
            self._check_taken(state)
        if self._failure.closing:
            raise ExchangeError(f"rank {rank}: this compression was closed while the optimizer waited for results")
        if missing := self._buckets.missing(step):
            raise ConfigError(
                f"rank {rank}: no gradient was offered in step {step} for "
                f"{len(missing)} parameter(s): {', '.join(missing[:5])}; give named_parameters with "
                f"exactly the parameters of this optimizer"
            )
        if not (self._exchanging.alive() and self._failure.workers_alive()):
            raise ExchangeError(f"rank {rank}: a thread of the reducer ended unexpectedly; this is a bug")

    def _check_taken(self, state: BucketState) -> None:
        if refused := state.offers.refused:
            raise ExchangeError(
                f"rank {self._context.rank}: the gradients of bucket {state.bucket.index} could not be processed: "
                f"{refused}; restart the job from a checkpoint"
            ) from refused
