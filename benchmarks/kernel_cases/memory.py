"""What the memory can do, and checksums."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from horovod_compress import ops

from .arrays import Arrays
from .case import Case, against_reference, kernel_case

CHECKED_BYTES = 1 << 20  # the reference of CRC-32C takes 0.1 microseconds a byte


def yardsticks(a: Arrays) -> Iterable[Case]:
    yield kernel_case("triad", 12 * a.count, "triad", a.out, a.grad, a.residual, 0.5)
    yield Case("memcpy (torch copy_)", 8 * a.count, lambda: a.out.copy_(a.grad))
    # What one core can read while it writes nothing: the ceiling of sign_pack, sign_offer and the checksums.
    yield Case("torch dot (reads only)", 8 * a.count, lambda: torch.dot(a.grad, a.residual))
    x = a.residual.numpy()  # which NumPy has a type for
    yield Case("numpy packbits(x >= 0)", 4 * a.count, lambda: np.packbits(np.greater_equal(x, 0, out=a.flags)))
    yield Case("torch sign step", 24 * a.count, lambda: torch_sign_step(a))


def torch_sign_step(a: Arrays) -> None:
    """What sign_offer and sign_decode do, without the packing, in torch with preallocated outputs."""
    torch.add(a.grad, a.residual, out=a.work)
    step = torch.linalg.vector_norm(a.work, ord=1) / a.count
    torch.sign(a.work, out=a.out).mul_(step)
    torch.sub(a.work, a.out, out=a.left)


def checksums(a: Arrays) -> Iterable[Case]:
    n, piece = a.raw.numel(), a.raw[:CHECKED_BYTES]
    copy = a.left.view(torch.uint8)
    crc_check = against_reference("crc32c", piece)
    copy_check = against_reference("crc32c_copy", copy[: piece.numel()], piece)
    yield Case("crc32c", n, lambda: ops.crc32c(a.raw), crc_check)
    yield Case("crc32c_copy", 2 * n, lambda: ops.crc32c_copy(copy, a.raw), copy_check)
    yield kernel_case("hash64", n, "hash64", a.raw)
