"""How Horovod ends: by one thread at a time, and never in a fork.

Horovod's shutdown joins its background thread. Two threads that join the same one are more than the system allows: the
second is never woken. But this package ends Horovod from a thread of its own, where the training thread waits in it for
a silent rank, and the training thread then comes to the same function at the interpreter's end. So all calls go through
one gate here; the second call finds that nothing is left to do.

A fork has a copy of Horovod's state, and none of its threads: it would wait for one that it does not have.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from ...errors import HorovodCompressError


class Gate:
    """Lets one call at a time through to a function of this process.

    Attributes:
        calls: how many have come through.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._lock, self._process = function, threading.Lock(), os.getpid()
        self.calls = 0

    def __call__(self) -> Any:
        if os.getpid() != self._process:
            return None
        interrupt = self._enter()
        try:
            self.calls += 1
            found = self._function()
        finally:
            self._lock.release()
        if interrupt:
            raise interrupt
        return found

    def _enter(self) -> KeyboardInterrupt | None:
        """Wait for the turn, even if the user interrupts: whoever left now would end in the same wait, without end."""
        interrupt = None
        while True:
            try:
                self._lock.acquire()
            except KeyboardInterrupt as error:
                interrupt = error
            else:
                return interrupt


def guard() -> Gate | None:
    """Put the gate before Horovod's shutdown, whoever calls it; None where this Horovod has none to be found."""
    library: Any = getattr(mpi_ops._basics, "MPI_LIB_CTYPES", None)
    function = getattr(library, "horovod_shutdown", None)
    if function is None:
        return None
    if not isinstance(function, Gate):
        function = Gate(function)
        library.horovod_shutdown = function  # where every caller in Python finds it
    return function


def end_all_waits() -> None:
    """Shut Horovod down, on all ranks, so that every wait in it ends with HorovodInternalError.

    Not ``hvd.shutdown()``: that forgets the handles first, and their waits would end with ValueError.
    """
    guard()
    mpi_ops._basics.shutdown()


class Run:
    """One run of Horovod, from its initialization to its end, which an elastic job follows with another one."""

    def __init__(self) -> None:
        self._gate, self._process = guard(), os.getpid()
        self._calls = self._gate.calls if self._gate else 0

    def forked(self) -> bool:
        """Return whether this process is a fork of that which began it, and has none of its threads."""
        return os.getpid() != self._process

    def replaced(self) -> bool:
        """Return whether Horovod has been initialized again since."""
        return bool(self._gate and self._gate.calls != self._calls and hvd.is_initialized())


def explain(optimizer: Any, reason: Callable[[Any, str], Exception | None]) -> None:
    """Let a stock optimizer's errors say which rank has failed or is silent, as far as that can be learned.

    Where a rank is gone, Horovod ends on all others, and its error only says so.

    Args:
        optimizer: one of Horovod's, of which ``synchronize`` and, where it has it, the private method that hands over
            one gradient are replaced.
        reason: returns the error to raise, for the optimizer and what Horovod said.
    """
    for name in ("synchronize", "_allreduce_grad_async"):
        if stock := getattr(optimizer, name, None):
            setattr(optimizer, name, _explained(stock, functools.partial(reason, optimizer)))


def _explained(stock: Callable[..., Any], reason: Callable[[str], Exception | None]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def call(*given: Any, **options: Any) -> Any:
        try:
            return stock(*given, **options)
        except HorovodCompressError:
            raise
        except HorovodInternalError as error:
            if found := reason(" ".join(str(error).split()).rstrip(".")):
                raise found from error
            raise

    return call
