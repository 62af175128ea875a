"""The few calls into Horovod that need a bound of time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from horovod.torch import mpi_ops

from ...engine.agreement.uneven import ADVICE
from ...errors import ConfigError, ExchangeError
from ..common.meetings import why_not_all
from .gathering import NotAll, gather
from .rollcall import RollCall

_WITH_JOIN = "is not supported with Join"  # in Horovod's refusal of a gather
_FRAMES = 10  # between compress() and the optimizer there are two to four, and some of our own


def allgather_object(
    value: Any,
    name: str,
    process_set: Any,
    seconds: float,
    *,
    by_name: bool = False,
    under: str | None = None,
    failed: Callable[[], bool] = lambda: False,
) -> list[Any]:
    """Gather plain data of every rank, as ``hvd.allgather_object`` does, but with a deadline, and without pickles.

    Args:
        under: the name that Horovod knows it by, where that is another one.
        by_name: leave word that this rank is there, so that an error can name the ranks that are not; for gathers that
            happen once.
        failed: returns whether it is known that not every rank will come.

    Raises:
        ExchangeError: not every rank took part in time, or Horovod has ended.
        ConfigError: some rank is in ``hvd.join()``.
    """
    roll = RollCall(name, process_set) if by_name else None
    try:
        values = gather(value, under or name, process_set, seconds, failed)
    except HorovodInternalError as error:
        if _WITH_JOIN in str(error):
            raise ConfigError(f"a rank has called hvd.join() while rank {hvd.rank()} begins a step; {ADVICE}") from None
        raise ExchangeError(_why_not_all(name, error, roll)) from None
    if roll:
        roll.held()
    return values


def _why_not_all(name: str, error: Exception, roll: RollCall | None) -> str:
    """Return what is known of a gather that did not take place; what Horovod says of it, which is little, last."""
    late = isinstance(error, NotAll)
    said = " ".join(str(error).split()).rstrip(".")
    absent = roll.absent() if roll else []
    ended = "" if late else f". Horovod has ended, and says: {said}"
    return why_not_all(name, hvd.rank(), f"{said} s" if late else None, absent) + ended


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
    for frame in sys._current_frames().values():
        inside = False
        at: FrameType | None = frame
        while at is not None:
            inside = inside or at.f_code is wait
            if inside and getattr(at.f_locals.get("self"), "_compression", None) is compression:
                return True
            at = at.f_back
    return False


def in_join() -> bool:
    """Return whether a thread is inside ``hvd.join()``."""
    join = mpi_ops.join.__code__
    for frame in sys._current_frames().values():
        at: FrameType | None = frame
        while at is not None:
            if at.f_code is join:
                return True
            at = at.f_back
    return False


def calling_optimizer(compression: Any) -> Any | None:
    """Return the optimizer on whose behalf Horovod called ``compress`` or ``decompress``.

    Horovod does not say, and only the optimizer knows whether its step was synchronized already.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        candidate = frame.f_locals.get("self")
        if getattr(candidate, "_compression", None) is compression:
            return candidate
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def densified_parameter(tensor: Any) -> Any | None:
    """Return the parameter with a sparse gradient whose dense copy ``compress`` was given, as by ``sparse_as_dense``.

    Only the frame of the optimizer that made the copy knows both.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        found = frame.f_locals.get("p")
        grad = getattr(found, "grad", None)
        if frame.f_locals.get("tensor") is tensor and isinstance(grad, torch.Tensor) and grad.is_sparse:
            return found
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def in_broadcast_optimizer_state() -> bool:
    """Return whether Horovod calls an optimizer's ``step`` only to make it build its state."""
    frame = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame.f_code.co_name == "broadcast_optimizer_state":
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def forget_step(optimizer: Any) -> None:
    """Reset what Horovod keeps of an unfinished step, as its ``load_state_dict`` does.

    Else the next backward pass would stop at Horovod's count of passes, not at the reason.
    """
    optimizer._handles = {}
    for parameter in optimizer._allreduce_delay:
        optimizer._allreduce_delay[parameter] = optimizer.backward_passes_per_step
