"""Samples that all ranks draw alike."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ..keys import Key
from .numbers import load, offered, philox4x32, quiet, store


def _chosen(count: int, k: int, key: Key, first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the chosen block of each group, and how many blocks the groups have."""
    begins = np.array([count * i // k for i in range(k + 1)], dtype=np.int64)
    sizes, numbers = np.diff(begins), np.arange(first, first + k, dtype=np.uint64)
    k0, k1, *constants, _ = key.words()
    words = np.stack(np.broadcast_arrays(*philox4x32((numbers // 4, *constants), (k0, k1)))).astype(np.uint64)
    draws = words[(numbers % 4).astype(np.int64), np.arange(k)]
    return begins[:-1] + (draws * sizes.astype(np.uint64) >> np.uint64(32)).astype(np.int64), sizes


def _places(count: int, k: int, key: Key, first: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the elements of the chosen blocks, and for each how many blocks its group has."""
    blocks, sizes = _chosen(-(-count // block), k, key, first)
    return (blocks[:, None] * block + np.arange(block)).reshape(-1), sizes.repeat(block)


@quiet
def sample_offer(grad: Tensor, residual: Tensor | None, values: Tensor, key: Key, *, first: int, block: int) -> int:
    x = offered(grad, residual)
    if values.numel():
        places, _ = _places(x.size, values.numel() // block, key, first, block)
        inside = places < x.size
        values.numpy()[:] = np.where(inside, x[np.where(inside, places, 0)], 0)
    return int(np.count_nonzero(~np.isfinite(x)))


@quiet
def sample_decode(
    values: Tensor,
    grad: Tensor,
    residual: Tensor | None,
    key: Key,
    scale: float,
    *,
    first: int,
    weighted: bool,
    block: int,
) -> None:
    x, result = offered(grad, residual), np.zeros_like(load(grad))
    if values.numel():
        places, sizes = _places(x.size, values.numel() // block, key, first, block)
        inside = places < x.size
        sums = values.numpy() * sizes.astype(x.dtype) if weighted else values.numpy()
        result[places[inside]] = (sums * x.dtype.type(scale))[inside]
        x[places[inside]] = 0
    if residual is not None:
        residual.numpy()[:] = x
    store(grad, result)
