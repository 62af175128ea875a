"""All ranks begin with the parameters and buffers of rank 0, as DistributedDataParallel lets them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.shards import local
from ...errors import ConfigError, MismatchError, one_line, some_of
from ..session import Session

_BROADCAST_BYTES = 250 << 20  # at once, as DistributedDataParallel does it
#: Types that every backend of torch.distributed broadcasts.
_USUAL = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)


def begin_alike(of_module: Iterable[tuple[str, Tensor]], session: Session, group: Any) -> None:
    """Let every rank begin with the parameters and buffers of rank 0, as DistributedDataParallel does.

    Args:
        of_module: these, by name.

    Raises:
        MismatchError: the modules of ranks differ.
        ExchangeError: not every rank came in time.
        ConfigError: there is a tensor that torch cannot broadcast.
    """
    named = [(name, local(one)) for name, one in of_module]
    mine = [[name, f"{tensor.dtype}".removeprefix("torch."), list(tensor.shape)] for name, tensor in named]
    for rank, theirs in enumerate(session.gather(mine, "hvc.register", by_name=True)):
        if theirs == mine:
            continue
        here, there = (next((o for o in a if o not in b), None) for a, b in ((mine, theirs), (theirs, mine)))
        if here or there:
            raise MismatchError(
                f"the modules given to register() differ: rank {session.job.rank} has {_in_words(here)}, rank {rank} "
                f"has {_in_words(there)}; names, shapes and types of parameters and buffers have to be equal"
            )
    if session.job.size > 1:
        tensors = [_broadcast_as(tensor.detach()) for _, tensor in named]
        try:
            dist._broadcast_coalesced(group, tensors, _BROADCAST_BYTES, 0)
        except RuntimeError as error:
            if not (odd := [name for (name, _), tensor in zip(named, tensors, strict=True) if _is_odd(tensor)]):
                raise
            raise ConfigError(
                f"rank {session.job.number}: torch cannot broadcast {some_of(odd)} of the module given to register(), "
                f"so ranks would not begin alike ({one_line(error, 200)}); make it dense and contiguous, or a plain "
                "attribute, which every rank makes itself"
            ) from None


def _broadcast_as(tensor: Tensor) -> Tensor:
    """Return a tensor, as its bytes if it is of a rare type, such as int16 or float8."""
    if tensor.layout is not torch.strided or tensor.dtype in _USUAL or not tensor.is_contiguous():
        return tensor
    return tensor.view(-1).view(torch.uint8)


def _is_odd(tensor: Tensor) -> bool:
    """Return whether a tensor is one that torch may not broadcast: sparse, with shared elements, or of a rare type."""
    shared = tensor.layout is not torch.strided or torch._debug_has_internal_overlap(tensor) == 1
    return shared or tensor.dtype not in _USUAL


def _in_words(one: Any) -> str:
    return "none beside those of the other" if one is None else f"{one[0]} of type {one[1]} and shape {tuple(one[2])}"
