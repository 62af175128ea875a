"""Hashes of tensors, that ranks compare: 64 bits of what a tensor holds, whatever device it is on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor

from . import hash64


def hash_of(tensors: Iterable[Tensor]) -> int:
    """Return 64 bits, unsigned, that stand for the bytes of some tensors in this order."""
    value = 1
    for tensor in tensors:
        if tensor.numel():
            with on_its_device(tensor):
                value = hash64(tensor.detach().contiguous().view(-1).view(torch.uint8), value)
    return value


def hash_of_text(text: str) -> int:
    """Return 64 bits, unsigned, that stand for a text; 0 for an empty one."""
    return hash_of([torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)]) if text else 0


def signed(bits: int) -> int:
    """Return 64 bits as the int64 that they are."""
    return bits - (1 << 64) if bits >> 63 else bits


def on_its_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Let a tensor's GPU be the current one, as kernels need; a program's own may be another."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
