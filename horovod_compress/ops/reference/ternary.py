"""Folding signs to three values again, in slow and readable NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .numbers import unpacked, write_bits
from .shaped import _signs

_WEIGHTS = 3 ** np.arange(5).reshape(5, 1)


def _steps_and_states(ranks: int) -> tuple[int, int]:
    """Return how far apart the values are that can be kept, and how many there are; their middle is 0."""
    return (1, ranks) if ranks % 2 else (2, ranks // 2 + (ranks % 4 == 0))


def left_over(rows: Sequence[Tensor], ranks: int, count: int) -> np.ndarray:
    """Return E of every element: from -(ranks // 2) to ranks // 2."""
    step, states = _steps_and_states(ranks)
    stored = np.zeros(count, dtype=np.int64)
    for place, row in enumerate(rows[: (states - 1).bit_length()]):
        stored |= unpacked(row, count).astype(np.int64) << place
    return np.asarray(step * (2 * (stored ^ states // 2) - (states - 1)) // 2)


def _keep(rows: Sequence[Tensor], ranks: int, rest: np.ndarray) -> None:
    step, states = _steps_and_states(ranks)
    stored = (2 * rest // step + states - 1) // 2 ^ states // 2
    for place, row in enumerate(rows[: (states - 1).bit_length()]):
        write_bits(row, (stored >> place & 1).astype(bool))


def ternary_fold(parts: Sequence[Tensor], out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    ranks, count = len(parts), 64 * parts[0].numel()
    y = np.sum([_signs(part) for part in parts], axis=0) + left_over(before, ranks, count)
    t = np.where(2 * np.abs(y) >= ranks, np.sign(y), 0)
    _keep(after, ranks, y - ranks * t)
    digits = (t + 1).reshape(-1, 5, 64)  # of group, word and lane
    out.numpy().view(np.uint8)[:] = (digits * _WEIGHTS).sum(axis=1).astype(np.uint8).reshape(-1)


def ternary_unpack(packed: Tensor, bits: Tensor, zeros: Tensor) -> None:
    left = packed.numpy().view(np.uint8).astype(np.int64).reshape(-1, 64)
    digits = np.zeros((left.shape[0], 5, 64), dtype=np.int64)
    for place in reversed(range(5)):
        digits[:, place] = np.minimum(left // 3**place, 2)
        left -= digits[:, place] * 3**place
    write_bits(bits, (digits >= 1).reshape(-1))
    write_bits(zeros, (digits == 1).reshape(-1))
