"""One backward pass: the buckets that DistributedDataParallel waits for, and who completes them.

A communication hook must not wait: where the hooks of ranks fire in different orders, each would wait for the others.
So it returns a future. A thread fetches the results when the last bucket was handed over, and completes the futures:
DistributedDataParallel may wait for them inside a lock, as it does in the first step of a static graph.

An error set on such a future would reach the training thread as a RuntimeError about types. So futures are always
completed, and the error is raised by a callback at the end of the backward pass, before DistributedDataParallel looks
at what came. Where training may go on, it is raised by another one behind that, when all is as after any step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import ExchangeError, HorovodCompressError, NonFiniteError

#: A future, the bucket's memory, and what was offered of it: parameters by number, and their step.
Pending = tuple[Any, Tensor, list[tuple[int, int]]]


class Backward:
    """The buckets of one backward pass.

    Args:
        result: waits for one result, by the number of the parameter and the step.
    """

    def __init__(self, result: Callable[[int, int], Tensor]) -> None:
        self._result = result
        self._pending: list[Pending] = []
        self._whole, self._done = False, threading.Event()
        self._error: HorovodCompressError | None = None

    def add(self, buffer: Tensor, offered: list[tuple[int, int]]) -> Any:
        """Return the future of a bucket whose gradients were offered."""
        on: Any = [buffer.device] if buffer.is_cuda else None
        future: Any = torch.futures.Future(devices=on)
        self._pending.append((future, buffer, offered))
        return future

    def complete(self) -> None:
        """Fetch all results and complete the futures; on a thread of its own, after the last bucket."""
        try:
            for _, _, offered in self._pending:
                for index, step in offered:
                    self._result(index, step)
        except HorovodCompressError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001  the training thread raises it
            self._error = ExchangeError(f"fetching results failed: {type(error).__name__}: {error}")
        finally:
            for future, buffer, _ in self._pending:
                with torch.cuda.device(buffer.device) if buffer.is_cuda else contextlib.nullcontext():
                    future.set_result(buffer)
            self._pending = []
            self._done.set()

    def close(self) -> None:
        """Note that the last bucket was handed over."""
        self._whole = True

    def end(self) -> None:
        """At the end of the backward pass, on the thread that ends it: raise what went wrong.

        Raises:
            HorovodCompressError: see :meth:`~horovod_compress.engine.reducer.Reducer.result`.
        """
        if not self._whole:
            return  # DistributedDataParallel says so itself: some parameters have got no gradient
        self._done.wait()
        error, self._error = self._error, None
        if isinstance(error, NonFiniteError):
            at_the_end(_raising(error))
        elif error:
            raise error


def _raising(error: Exception) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


def at_the_end(call: Callable[[], None]) -> None:
    """Have something called at the end of this backward pass, after what was asked for before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)
