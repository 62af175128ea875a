"""A thread for work that others need not wait for: taking in gradients, decoding results."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

import torch

Task = Callable[[], None]

_LOOK_SECONDS = 1.0


class Worker:
    """Runs tasks one after the other, in the order in which they were given.

    Args:
        name: of the thread.
        failed: called on this thread with the first error of a task; later tasks are
            left out then.
        within: returns a context that all tasks run in.
    """

    def __init__(
        self,
        name: str,
        failed: Callable[[BaseException], None],
        within: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._failed, self._within = failed, within
        self._leaves_out = False
        self._tasks: queue.SimpleQueue[Task | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Task) -> None:
        """Have a task run; never blocks."""
        self._tasks.put(task)

    def drain(self) -> None:
        """Wait until all tasks given before are done or skipped, or the thread has ended."""
        done = threading.Event()
        self._tasks.put(done)
        while not done.wait(_LOOK_SECONDS) and self.alive():
            pass

    def leave_out(self) -> None:
        """Skip all tasks that have not begun: their results are no longer needed."""
        self._leaves_out = True

    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, seconds: float) -> None:
        """End the thread after the tasks given before; safe to call twice."""
        self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        with torch.no_grad(), self._within():
            while (task := self._tasks.get()) is not None:
                if isinstance(task, threading.Event):
                    task.set()
                elif not self._leaves_out:
                    self._run_one(task)
                del task  # it may hold the last reference to a gradient

    def _run_one(self, task: Task) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001  somebody waits for what comes of it, whatever happened
            self._leaves_out = True
            with contextlib.suppress(Exception):  # this thread has to go on: others wait for it to drain
                self._failed(error)
