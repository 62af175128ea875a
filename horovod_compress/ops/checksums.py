"""The operations that check bytes: checksums of frames, hashes of tensors that ranks compare, and how kernels run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor

from . import legality
from .dispatch import run

__all__ = ["crc32c", "crc32c_copy", "hash64", "instruction_set"]


def crc32c(data: Tensor, crc: int = 0) -> int:
    """Return the CRC-32C of ``uint8`` data in host memory; pass the previous value to continue one."""
    return run.crc32c(data, crc)


def crc32c_copy(dst: Tensor, src: Tensor, crc: int = 0) -> int:
    """Copy ``src`` to ``dst``, both in host memory, and return the CRC-32C of what was copied."""
    return run.crc32c_copy(dst, src, crc)


def hash64(data: Tensor, seed: int = 0) -> int:
    """Return a 64-bit hash of ``uint8`` data that any change within one 8-byte word changes.

    On CUDA this waits for the stream: the result is a number.
    """
    return run.hash64(data, seed)


def instruction_set() -> str:
    """Return what runtime dispatch chose: "avx512", "avx2", "generic" or "reference"."""
    return "reference" if legality.REFERENCE else str(legality.CPU.instruction_set())


# ---- of several tensors -------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as bytes, or that of a copy where it has gaps."""
    whole = tensor.detach().contiguous()
    # A single element may have any stride.
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def hash_of(tensors: Iterable[Tensor]) -> int:
    """Return 64 bits, unsigned, that stand for the bytes of some tensors in this order, whatever device they are on."""
    value = 1
    for tensor in tensors:
        if tensor.numel():
            with on_its_device(tensor):
                value = hash64(bytes_of(tensor), value)
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
