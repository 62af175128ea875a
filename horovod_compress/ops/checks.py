"""The operations that check bytes, and what says how kernels run."""

from __future__ import annotations

import torch
from torch import Tensor

from .legality import CPU, REFERENCE, backend, check_apart, checked

__all__ = ["crc32c", "crc32c_copy", "hash64", "instruction_set", "philox4x32"]


def crc32c(data: Tensor, crc: int = 0) -> int:
    """Return the CRC-32C of ``uint8`` data in host memory; pass the previous value to continue one."""
    count = data.numel()
    data_at = checked("data", data, torch.uint8, count, -1)
    return int(REFERENCE.crc32c(data, crc) if REFERENCE else CPU.crc32c(data_at, count, crc))


def crc32c_copy(dst: Tensor, src: Tensor, crc: int = 0) -> int:
    """Copy ``src`` to ``dst``, both in host memory, and return the CRC-32C of what was copied."""
    count = src.numel()
    src_at = checked("src", src, torch.uint8, count, -1)
    dst_at = checked("dst", dst, torch.uint8, count, -1)
    check_apart("dst", dst, "src", src)
    if REFERENCE:
        return int(REFERENCE.crc32c_copy(dst, src, crc))
    return int(CPU.crc32c_copy(dst_at, src_at, count, crc))


def hash64(data: Tensor, seed: int = 0) -> int:
    """Return a 64-bit hash of ``uint8`` data that any change within one 8-byte word changes.

    On CUDA this waits for the stream: the result is a number.
    """
    native, device, launch = backend(data)
    count = data.numel()
    data_at = checked("data", data, torch.uint8, count, device)
    return int(REFERENCE.hash64(data, seed) if REFERENCE else native.hash64(data_at, count, seed, launch))


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the Philox4x32-10 block of a counter and a key."""
    c0, c1, c2, c3 = (REFERENCE or CPU).philox4x32(counter, key)
    return c0, c1, c2, c3


def instruction_set() -> str:
    """Return what runtime dispatch chose: "avx512", "avx2", "generic" or "reference"."""
    return "reference" if REFERENCE else str(CPU.instruction_set())
