"""The thread that fetches the results of backward passes."""

from __future__ import annotations

import logging
import threading

from ...engine.context import Worker
from ...errors import ExchangeError
from .backward import Backward

_log = logging.getLogger("horovod_compress")
_CLOSE_SECONDS = 1.0


class Fetching:
    """Completes backward passes, in the order in which they come.

    Args:
        rank: for messages.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._ended, self._handing = rank, False, threading.Lock()
        self._worker = Worker("hvc-results", self._failed)

    def alive(self) -> bool:
        """Return whether the thread is there."""
        return self._worker.alive()

    def hand_over(self, backward: Backward) -> None:
        """Have the results of a backward pass fetched; another thread may be closing this."""
        with self._handing:  # else the thread could end between the look and the task
            if self.alive() and not self._ended:
                self._worker.put(backward.complete)
                return
        backward.give_up(
            ExchangeError(f"rank {self._rank}: this compression was closed in the middle of a backward pass")
        )

    def close(self) -> None:
        """End the thread after the passes given before; safe to call twice."""
        with self._handing:
            self._ended = True
        self._worker.close(_CLOSE_SECONDS)

    def _failed(self, error: BaseException) -> None:
        """Note that nobody fetches results any more."""
        with self._handing:
            self._ended = True
        _log.error("rank %s: the thread that fetches results failed: %r", self._rank, error)
