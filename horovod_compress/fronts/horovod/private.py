"""What is taken from Horovod's private parts: where its threads are, for whom it calls, and how it ends.

Horovod's shutdown joins its background thread. Two threads that join the same one are more than the system allows: the
second is never woken. But this package ends Horovod from a thread of its own, where the training thread waits in it for
a silent rank, and the training thread then comes to the same function at the interpreter's end. So all calls go through
one gate here; the second call finds that nothing is left to do.

A fork has a copy of Horovod's state, and none of its threads: it would wait for one that it does not have.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from ...errors import HorovodCompressError

_FRAMES = 10  # between compress() and the optimizer there are two to four, and some of our own


def owner_of_token() -> torch.Tensor:
    """Return a tensor that owns, as its ``grad``, a one-element token for Horovod.

    From PyTorch 2.10 on, the thread that drops the last C++ reference beside that of the Python wrapper takes Python's
    lock. When Horovod 0.28 ends, for whatever reason, its thread drops all tensors with Horovod's lock taken, while
    the thread that hands over the next one waits for that lock with Python's lock taken: without an owner the process
    hangs. Dense gradients have their parameters for owners.
    """
    owner = torch.empty(1, dtype=torch.float32, device="cpu")
    owner.grad = torch.empty_like(owner)
    return owner


def waits_for_tokens(compression: Any) -> bool:
    """Return whether a thread is inside Horovod's wait for one of this compression's tokens."""
    wait = mpi_ops.synchronize.__code__
    for thread in sys._current_frames().values():
        inside = False
        for frame in _outward(thread):
            inside = inside or frame.f_code is wait
            if inside and getattr(frame.f_locals.get("self"), "_compression", None) is compression:
                return True
    return False


def in_join() -> bool:
    """Return whether a thread is inside ``hvd.join()``."""
    join = mpi_ops.join.__code__
    return any(frame.f_code is join for thread in sys._current_frames().values() for frame in _outward(thread))


def calling_optimizer(compression: Any) -> Any | None:
    """Return the optimizer on whose behalf Horovod called ``compress`` or ``decompress``.

    Horovod does not say, and only the optimizer knows whether its step was synchronized already.
    """
    for frame in islice(_outward(sys._getframe(1)), _FRAMES):
        candidate = frame.f_locals.get("self")
        if getattr(candidate, "_compression", None) is compression:
            return candidate
    return None


def densified_parameter(tensor: Any) -> Any | None:
    """Return the parameter with a sparse gradient whose dense copy ``compress`` was given, as by ``sparse_as_dense``.

    Only the frame of the optimizer that made the copy knows both.
    """
    for frame in islice(_outward(sys._getframe(1)), _FRAMES):
        found = frame.f_locals.get("p")
        grad = getattr(found, "grad", None)
        if frame.f_locals.get("tensor") is tensor and isinstance(grad, torch.Tensor) and grad.is_sparse:
            return found
    return None


def calling_state(kind: type) -> Any | None:
    """Return the state of an elastic job that is being made and asks for its handlers; these are not told whose."""
    found = (frame.f_locals.get("self") for frame in islice(_outward(sys._getframe(1)), _FRAMES))
    return next((candidate for candidate in found if isinstance(candidate, kind)), None)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller's, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def has_begun(optimizer: Any) -> bool:
    """Return whether a backward pass has come since the last synchronize(), though Horovod waits for more of them."""
    passes = optimizer.backward_passes_per_step
    return any(left < passes for left in optimizer._allreduce_delay.values())


def await_tokens(optimizer: Any) -> None:
    """Wait for the tokens of a step that all ranks give up: the next ones have the same names."""
    for handle, _ in optimizer._handles.values():
        if isinstance(handle, int):
            mpi_ops.synchronize(handle)


def submit_rest(optimizer: Any, tokens: Mapping[Any, torch.Tensor]) -> None:
    """Have Horovod reduce the tokens that a step lacks; nobody waits for them.

    Args:
        tokens: by parameter.
    """
    if optimizer._groups is not None:
        return  # its groups are whole, or not there
    predivide = optimizer.gradient_predivide_factor if optimizer.op == mpi_ops.Average else 1.0
    submitted = {parameter for parameter, (handle, _) in optimizer._handles.items() if handle is not None}
    for parameter, token in tokens.items():
        sparse = parameter.grad is not None and parameter.grad.is_sparse and not optimizer.sparse_as_dense
        if parameter not in submitted and not sparse:
            mpi_ops.allreduce_async_(
                token, name=optimizer._parameter_names.get(parameter), op=optimizer.op,
                prescale_factor=1.0 / predivide, postscale_factor=predivide, process_set=optimizer.process_set,
            )  # fmt: skip


def hand_over_rest(optimizer: Any) -> None:
    """Hand over the gradients that an attached optimizer lacks in this step, as its ``synchronize()`` does."""
    for parameter in optimizer._requires_update:
        if optimizer._handles.get(parameter, (None, None))[0] is None:
            optimizer._handles[parameter] = optimizer._allreduce_grad_async(parameter)


def results_due(optimizer: Any) -> int:
    """Return how many results of ours an attached optimizer has yet to fetch in this step."""
    dense = [
        p for p in optimizer._handles if p.grad is not None and (optimizer.sparse_as_dense or not p.grad.is_sparse)
    ]
    return sum(callable(optimizer._handles[parameter][0]) for parameter in dense)


def with_settling(handed: tuple[Any, Any], settle: Callable[[], object]) -> tuple[Any, Any]:
    """Return what Horovod has made of a sparse gradient; before that is waited for, something is to be done."""
    handle, context = handed

    def wait() -> torch.Tensor:
        settle()
        found: torch.Tensor = handle()
        return found

    return wait, context


def forget_step(optimizer: Any) -> None:
    """Reset what Horovod keeps of an unfinished step, as its ``load_state_dict`` does.

    Else the next backward pass would stop at Horovod's count of passes, not at the reason.
    """
    optimizer._handles = {}
    for parameter in optimizer._allreduce_delay:
        optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step


# ---- how it ends: by one thread at a time, and never in a fork ----


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


def gate() -> Gate | None:
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
    gate()
    mpi_ops._basics.shutdown()


class Run:
    """One run of Horovod, from its initialization to its end, which an elastic job follows with another one."""

    def __init__(self) -> None:
        self._gate, self._process = gate(), os.getpid()
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
