"""Factors of low rank again, in slow and readable NumPy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..keys import Key
from .numbers import left_over, offered, quiet, random_words, store, too_large

_LANES, _BLOCK, _ROW_BLOCK = 32, 1024, 256
_DEPENDENT = {np.dtype(np.float32): 2.0**-20, np.dtype(np.float64): 2.0**-48}


def _lane_sums(products: np.ndarray) -> np.ndarray:
    """Add along the last axis: element j in lane j mod 32, in order, then the lanes pairwise."""
    *outer, count = products.shape
    padded = np.zeros((*outer, -(-count // _LANES) * _LANES), dtype=products.dtype)
    padded[..., :count] = products
    by_lane = padded.reshape(*outer, -1, _LANES)
    lanes = np.zeros((*outer, _LANES), dtype=products.dtype)
    for position in range(by_lane.shape[-2]):
        lanes += by_lane[..., position, :]
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return np.asarray(lanes[..., 0])


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Add products in float64, block by block."""
    products, total = a.astype(np.float64) * b.astype(np.float64), 0.0
    for first in range(0, products.size, _BLOCK):
        total += float(_lane_sums(products[first : first + _BLOCK]))
    return total


def _unit_scale(line: np.ndarray) -> float:
    """Return the power of two that takes the largest magnitude to [1, 4), or 0."""
    largest = float(np.abs(line).max())
    if largest == 0 or not np.isfinite(largest):
        return 0.0
    exponent = max(int(np.frexp(largest)[1]) - 1, -1023)
    return float(2.0 ** max(-exponent, -1022)) if exponent > -1023 else 2.0**1023


@quiet
def lowrank_start(kept: Tensor, right: Tensor, rank: int, key: Key, *, offset: int = 0) -> None:
    lines, out = kept.numpy().reshape(rank, -1), right.numpy().reshape(rank, -1)
    words = random_words(key, offset // 2, (offset + kept.numel() + 1) // 2 - offset // 2)
    drawn = words.astype("<u8").view("<i4")[offset % 2 :][: kept.numel()].reshape(lines.shape)
    for c, line in enumerate(lines):
        scale = _unit_scale(line)
        out[c] = line.astype(np.float64) * scale if scale else (drawn[c] >> 8).astype(np.float64) * 2.0**-23


@quiet
def lowrank_left(grad: Tensor, residual: Tensor | None, rows: int, right: Tensor, left: Tensor) -> int:
    x = offered(grad, residual)
    matrix = x.reshape(rows, -1)
    factor, out = right.numpy().reshape(-1, matrix.shape[1]), left.numpy().reshape(-1, rows)
    for c, line in enumerate(factor):
        out[c] = _lane_sums(matrix * line)
    return too_large(x)


@quiet
def lowrank_right(grad: Tensor, residual: Tensor | None, rows: int, left: Tensor, right: Tensor) -> None:
    matrix = offered(grad, residual).reshape(rows, -1)
    factor, out = left.numpy().reshape(-1, rows), right.numpy().reshape(-1, matrix.shape[1])
    for first in range(0, rows, _ROW_BLOCK):
        sums = np.zeros_like(out)
        for row in range(first, min(first + _ROW_BLOCK, rows)):
            sums += factor[:, row, None] * matrix[row]
        out[:] = sums if first == 0 else out + sums


@quiet
def lowrank_orthonormalise(lines: Tensor, rank: int) -> None:
    factor = lines.numpy().reshape(rank, -1)
    kind = factor.dtype
    for c, line in enumerate(factor):
        scale = _unit_scale(line)
        line[:] = (line.astype(np.float64) * scale).astype(kind) if scale else 0
        before = _dot(line, line)
        for other in [*factor[:c], *factor[:c]] if scale else []:
            share = _dot(other, line)
            line[:] = (line.astype(np.float64) - other.astype(np.float64) * share).astype(kind)
        after = _dot(line, line)
        kept = after > _DEPENDENT[kind] ** 2 * before
        line[:] = (line.astype(np.float64) * (1 / np.sqrt(after))).astype(kind) if kept else 0


@quiet
def lowrank_decode(
    left: Tensor, right: Tensor, rows: int, grad: Tensor, residual: Tensor | None, *, scale: float = 1.0
) -> None:
    a, b = left.numpy().reshape(-1, rows), right.numpy().reshape(left.numel() // rows, -1)
    total = a[0][:, None] * b[0]
    for mine, theirs in zip(a[1:], b[1:], strict=True):
        total = total + mine[:, None] * theirs
    total = total.reshape(-1)
    if grad.dtype is torch.float16:  # what would leave it stays in the residual
        most = total.dtype.type(65504 / max(scale, 1.0))
        total = np.clip(total, -most, most)
    if residual is not None:
        residual.numpy()[:] = left_over(offered(grad, residual) - total)
    store(grad, total * total.dtype.type(scale))
