"""What Horovod does not say of itself: where its threads are, and for whom it calls."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any

import torch
from horovod.torch import mpi_ops

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


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


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


def in_broadcast_optimizer_state() -> bool:
    """Return whether Horovod calls an optimizer's ``step`` only to make it build its state."""
    callers = islice(_outward(sys._getframe(1)), _FRAMES)
    return any(frame.f_code.co_name == "broadcast_optimizer_state" for frame in callers)


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


def forget_step(optimizer: Any) -> None:
    """Reset what Horovod keeps of an unfinished step, as its ``load_state_dict`` does.

    Else the next backward pass would stop at Horovod's count of passes, not at the reason.
    """
    optimizer._handles = {}
    for parameter in optimizer._allreduce_delay:
        optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
