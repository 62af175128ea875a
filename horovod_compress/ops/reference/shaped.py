"""Noise-shaped merging again, in slow and readable NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .numbers import unpacked, write_bits


def rounded_off(rows: Sequence[Tensor], ranks: int) -> np.ndarray:
    """Return E of every element: an even number from -ranks to ranks - 1."""
    count, middle = 64 * rows[0].numel() if rows else 0, ranks // 2
    stored = sum(unpacked(row, count).astype(np.int64) << place for place, row in enumerate(rows))
    return np.asarray(2 * ((stored ^ middle) - middle))


def _keep(rows: Sequence[Tensor], ranks: int, rest: np.ndarray) -> None:
    middle = ranks // 2
    stored = (rest // 2 + middle) ^ middle
    for place, row in enumerate(rows[: (ranks - 1).bit_length()]):
        write_bits(row, (stored >> place & 1).astype(bool))


def _signs(bits: Tensor) -> np.ndarray:
    return np.where(unpacked(bits, 64 * bits.numel()), 1, -1)


def _round(y: np.ndarray, out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor], ranks: int) -> None:
    """Round ``y``, and what was rounded off before, to a sign for that many ranks."""
    needed = (ranks - 1).bit_length()
    if needed:
        y = y + rounded_off(before[:needed], ranks)
    sign = np.where(y >= 0, 1, -1)
    write_bits(out, sign > 0)
    _keep(after, ranks, y - ranks * sign)


def shaped_merge(into: Tensor, other: Tensor, before: Sequence[Tensor], after: Sequence[Tensor], ranks: int) -> None:
    _round((ranks - 1) * _signs(other) + _signs(into), into, before, after, ranks)


def shaped_fold(parts: Sequence[Tensor], out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    total = np.sum([_signs(part) for part in parts], axis=0)
    _round(total, out, before, after, len(parts))
