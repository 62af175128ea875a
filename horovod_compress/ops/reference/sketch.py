"""The count sketch again, in slow and readable NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..keys import Key
from .numbers import bounded, load, philox4x32, quiet

BLOCK = 16
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


# ---- where elements lie -----------------------------------------------------------------------


def _draw(key: Key, digit: int, groups: np.ndarray) -> tuple[np.ndarray, ...]:
    k0, k1, c1, c2, c3 = key.words()
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
