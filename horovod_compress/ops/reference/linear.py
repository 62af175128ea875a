"""Count sketches, and factors of low rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..keys import Key
from .numbers import bounded, lane_sums, left_over, load, offered, philox4x32, quiet, random_words, store, too_large

BLOCK = 16
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


# ---- where elements lie -----------------------------------------------------------------------


def _draw(key: Key, digit: int, groups: np.ndarray) -> tuple[np.ndarray, ...]:
    k0, k1, c1, c2, c3, _ = key.words()
    constants = (np.full_like(groups, word) for word in (c1 | digit, c2, c3))
    return philox4x32((groups, *constants), (k0, k1))


def _scaled_draw(low: np.ndarray, high: np.ndarray, bound: int) -> np.ndarray:
    """Return ``floor(64 random bits * bound / 2**64)``."""
    return (high * np.uint64(bound) + (low * np.uint64(bound) >> _HALF)) >> _HALF


def bijection(key: Key, row: int, layers: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """Return step and start of the map of each layer: ``b -> (step * b + start) % places``."""
    r0, r1, r2, r3 = _draw(key, 1 + row, layers.astype(np.uint64))
    return np.uint64(1) + _scaled_draw(r0, r1, places - 1), _scaled_draw(r2, r3, places)


def cells(key: Key, rows: int, columns: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the column of every position in every row, and whether it is negated there."""
    places = columns // BLOCK
    blocks, inverse = np.unique(positions.astype(np.uint64) // np.uint64(BLOCK), return_inverse=True)
    lane = positions.astype(np.int64) % BLOCK
    r0, r1, r2, r3 = _draw(key, 0, blocks)
    low, high = r1 << _HALF | r0, r3 << _HALF | r2
    columns_of, negative = [], []
    for row in range(rows):
        step, start = bijection(key, row, blocks // np.uint64(places), places)
        place = (step * (blocks % np.uint64(places)) + start) % np.uint64(places)
        signs = (low >> np.uint64(16 * row) if row < 4 else high) & np.uint64(0xFFFF)
        turn = (high >> np.uint64(16 + 4 * row)) & np.uint64(15)
        columns_of.append(place.astype(np.int64)[inverse] * BLOCK + (lane ^ turn.astype(np.int64)[inverse]))
        negative.append((signs.astype(np.int64)[inverse] >> lane & 1).astype(bool))
    return np.array(columns_of), np.array(negative)


# ---- kernels ----------------------------------------------------------------------------------


def _absorbed(grad: Tensor, residual: Tensor | None, momentum: Tensor | None, factor: float) -> np.ndarray:
    x = load(grad)
    if momentum is not None:
        x = x.dtype.type(factor) * momentum.numpy() + x
    return x if residual is None else residual.numpy() + x


@quiet
def sketch_encode(
    grad: Tensor,
    residual: Tensor | None,
    table: Tensor,
    rows: int,
    key: Key,
    *,
    offset: int = 0,
    momentum: Tensor | None = None,
    factor: float = 0.0,
) -> int:
    found = _absorbed(grad, residual, momentum, factor)
    x = np.zeros(-(-found.size // BLOCK) * BLOCK, dtype=found.dtype)  # absent elements are zeros
    x[: found.size] = found
    sums = table.numpy().reshape(rows, -1)
    where, negative = cells(key, rows, sums.shape[1], offset + np.arange(x.size))
    for row in range(rows):
        np.add.at(sums[row], where[row], np.where(negative[row], -x, x))  # one after the other
    return int(np.count_nonzero(~np.isfinite(found)))


#: Blocks whose sums :func:`norm_sketch` makes before it adds these, and those that share words of signs.
UNIT, GROUP = 4096, 32


@quiet
def norm_sketch(grad: Tensor, sums: Tensor, key: Key, *, counters: int, offset: int = 0) -> None:
    x, places = load(grad), counters // BLOCK
    of, lane = np.arange(x.size) // BLOCK, np.arange(x.size) % BLOCK
    first = np.arange(0, -(-x.size // BLOCK), GROUP, dtype=np.uint64) + np.uint64(offset // BLOCK)
    drawn = [np.stack(_draw(key, digit, first // np.uint64(4)), axis=1).astype(np.int64) for digit in range(5)]
    signs, turns = np.concatenate(drawn[:4], axis=1), drawn[4]
    group, block, unit = of // GROUP, of % GROUP, UNIT * BLOCK
    turn = turns[group, block // places]
    where = (of % places ^ turn & places - 1) * BLOCK + (lane ^ turn >> 4 & BLOCK - 1)
    signed = np.where(signs[group, lane] >> GROUP - 1 - block & 1, -x, x)
    total = np.zeros(counters)
    for start in range(0, x.size, unit):
        part = np.zeros(counters, dtype=x.dtype)
        np.add.at(part, where[start : start + unit], signed[start : start + unit])  # one after the other
        total += part
    total[np.isnan(total)] = np.nan
    sums.numpy()[:] = total


@quiet
def _estimates(table: Tensor, rows: int, key: Key, positions: np.ndarray) -> np.ndarray:
    """Return the medians over the rows, in an order that knows one NaN, above infinity."""
    values = table.numpy().reshape(rows, -1)
    where, negative = cells(key, rows, values.shape[1], positions)
    signed = np.take_along_axis(values, where, axis=1) if positions.size else values[:, :0]
    signed = np.where(negative, -signed, signed)
    signed[np.isnan(signed)] = np.nan
    integers = np.dtype(f"i{signed.itemsize}")
    magnitude = np.iinfo(integers).max
    bits = signed.view(integers)
    order = np.sort(np.where(bits < 0, bits ^ magnitude, bits), axis=0)[rows // 2]
    middle: np.ndarray = np.where(order < 0, order ^ magnitude, order).astype(integers).view(signed.dtype)
    return middle


def sketch_top(
    table: Tensor,
    rows: int,
    key: Key,
    spans: Sequence[tuple[int, int]],
    k: int,
    positions: Tensor,
    estimates: Tensor,
) -> int:
    every = np.concatenate([np.arange(0), *(np.arange(start, start + count) for start, count in spans)])
    found = _estimates(table, rows, key, every)
    integers = np.dtype(f"i{found.itemsize}")
    magnitude = found.view(integers) & np.iinfo(integers).max
    best = np.lexsort((every, -magnitude))[:k]
    chosen = np.sort(best[magnitude[best] > 0])
    positions.numpy()[: chosen.size] = every[chosen]
    estimates.numpy()[: chosen.size] = found[chosen]
    return chosen.size


def sketch_clear(table: Tensor, rows: int, key: Key, positions: Tensor) -> None:
    values = table.numpy().reshape(rows, -1)
    where, _ = cells(key, rows, values.shape[1], positions.numpy())
    np.put_along_axis(values, where, 0, axis=1)


@quiet
def absorb(grad: Tensor, residual: Tensor, momentum: Tensor | None = None, factor: float = 0.0) -> None:
    more = _absorbed(grad, None, momentum, factor)
    if momentum is not None:
        more = bounded(more)
        momentum.numpy()[:] = more
    residual.numpy()[:] = bounded(residual.numpy() + more)
    grad.zero_()


_SUM_BLOCK, _ROW_BLOCK = 1024, 256
_DEPENDENT = {np.dtype(np.float32): 2.0**-20, np.dtype(np.float64): 2.0**-48}


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Add products in float64, block by block."""
    products, total = a.astype(np.float64) * b.astype(np.float64), 0.0
    for first in range(0, products.size, _SUM_BLOCK):
        total += float(lane_sums(products[first : first + _SUM_BLOCK]))
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
        out[c] = lane_sums(matrix * line)
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
