"""How a compression ends: by a call, once nobody refers to it any more, or with the process."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ..engine.agreement import notes
from ..engine.job import Job
from ..exchange.device import Deadline

_log = logging.getLogger("horovod_compress")


class Closing:
    """What is closed with a compression: by whoever calls that, or once nobody refers to the compression any more.

    At the end of the program others see to it.
    """

    def __init__(self, compression: object, job: Job) -> None:
        self._job, self._closers = job, list[tuple[Callable[[], object], Callable[[], object]]]()
        self._finalizer = weakref.finalize(compression, _dropped, job, self._closers)
        self._finalizer.atexit = False

    def add(self, close: Callable[[], object], drop: Callable[[], object] | None = None) -> None:
        """Close this too, after all others; it must not keep the compression alive.

        Args:
            drop: called in its place where nobody has called :meth:`close`.
        """
        self._closers.append((close, drop or close))

    def close(self) -> None:
        """Close everything; safe to call twice. In a fork it does nothing."""
        self._finalizer.detach()
        for close, _ in () if self._job.forked() else self._closers:
            close()


#: Held while what was dropped is being closed. In a fork nobody closes it.
_dropping: list[_thread.LockType] = []
os.register_at_fork(after_in_child=_dropping.clear)


def _dropped(job: Job, closers: Sequence[tuple[object, Callable[[], object]]]) -> None:
    """Close on a thread of its own: the garbage collector comes from any thread, with whatever lock that holds."""
    if job.forked():
        return
    closing = _thread.allocate_lock()
    closing.acquire()
    _dropping.append(closing)
    try:
        drops = [drop for _, drop in closers]
        _thread.start_new_thread(_start, (drops, closing))  # threading has locks of its own: this waits for none
    except RuntimeError:  # the interpreter is about to end
        closing.release()


def _start(closers: Sequence[Callable[[], object]], closing: _thread.LockType) -> None:
    """Close on a thread that Python knows, and forgets again."""
    try:
        threading.Thread(target=_close, args=(closers, closing), name="hvc-dropped", daemon=True).start()
    except RuntimeError:  # the interpreter is about to end
        closing.release()


def _close(closers: Sequence[Callable[[], object]], closing: _thread.LockType) -> None:
    try:
        for close in closers:
            try:
                close()
            except Exception as error:  # noqa: BLE001  the others are to be closed all the same
                _log.warning("closing a compression that was dropped failed: %s", error)
    finally:
        _dropping.remove(closing)
        closing.release()


def await_dropped(seconds: float) -> None:
    """Wait until all that was dropped is closed: an interpreter that ends in the middle would abort the process."""
    deadline = Deadline(seconds)
    for closing in list(_dropping):  # noqa: PERF101  threads take theirs out meanwhile
        if closing.acquire(timeout=deadline.left()):
            closing.release()


# ---- the end of the process ----------------------------------------------------------------------

#: All compressions of this process that were not closed yet.
left_open: weakref.WeakSet[Any] = weakref.WeakSet()
#: How long the end of the process waits for what was dropped before: longer than closing takes at most.
_DROPPED_SECONDS = 10.0


def keep_open(compression: Any) -> None:
    """Close a compression at the end of the process, unless it was closed by then."""
    left_open.add(compression)
    atexit.unregister(_leave_words)
    atexit.register(_leave_words)  # the last handler runs first: before Horovod's, whose end the other ranks see


def _leave_words() -> None:
    """Tell the other ranks why this one ends, before they see that it does."""
    why = notes.why_ended()
    for compression in list(left_open):
        with contextlib.suppress(Exception):  # it is closed all the same
            compression._leave_word(why)


@atexit.register
def _close_all() -> None:
    await_dropped(_DROPPED_SECONDS)
    for compression in list(left_open):
        try:
            compression.close()
        except Exception as error:  # noqa: BLE001  the others are to be closed all the same
            _log.warning("closing a compression at exit failed: %s", error)
