"""A thread that decodes results while the exchange thread goes on with the next chunk or bucket."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

Task = Callable[[], None]


class Decoder:
    """Runs tasks one after the other, in the order in which they were given.

    Args:
        failed: called on the decoder's thread with the first error of a task; later tasks are
            left out then.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._error: BaseException | None = None
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hvc-decode", daemon=True)
        self._thread.start()

    def put(self, task: Task) -> None:
        """Have a task run; never blocks."""
        self._tasks.put(task)

    def drain(self) -> None:
        """Wait until all tasks given before are done, or left out after an error."""
        done = threading.Event()
        self._tasks.put(done.set)
        done.wait()

    def close(self, seconds: float) -> None:
        """End the thread after the tasks given before; safe to call twice."""
        self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        with torch.no_grad():
            while task := self._tasks.get():
                self._run_one(task)
                del task  # it may hold the last reference to a gradient

    def _run_one(self, task: Task) -> None:
        is_drain = getattr(task, "__self__", None).__class__ is threading.Event
        if self._error and not is_drain:
            return
        try:
            task()
        except BaseException as error:  # the training thread waits for the result, whatever happened
            self._error = error
            self._failed(error)
