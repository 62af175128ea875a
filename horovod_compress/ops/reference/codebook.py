"""The levels that values are sent as."""

from __future__ import annotations

import itertools

import numpy as np
from torch import Tensor

from .numbers import quiet

CODE_BITS = {"codes2": 2, "codes4": 4, "codes8": 8}
_CELLS, _LARGEST = 1024, np.uint32(0x7F7FFFFF)


@quiet
def _magnitudes(x: np.ndarray) -> np.ndarray:
    """Return magnitudes as float32, at most its largest number, as NaN is."""
    return np.minimum(x.astype(np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF), _LARGEST).view(np.float32)


@quiet
def codebook_fit(values: Tensor, levels: Tensor, *, bits: int) -> None:
    magnitudes = _magnitudes(values.numpy()).view(np.uint32).astype(np.int64)
    low, high = (int(magnitudes.min()), int(magnitudes.max())) if magnitudes.size else (0, 0)
    shift = max(0, (high - low).bit_length() - 10)
    cells = magnitudes - low >> shift
    numbers, sums = np.bincount(cells, minlength=_CELLS), np.zeros(_CELLS, dtype=np.uint64)
    np.add.at(sums, cells, magnitudes.astype(np.uint64))
    means = (sums // np.maximum(numbers, 1).astype(np.uint64)).astype(np.uint32).view(np.float32)
    before = np.zeros((2, _CELLS + 1))
    for cell in range(_CELLS):  # one by one: in this order
        before[:, cell + 1] = before[:, cell] + (float(means[cell]) * float(numbers[cell]), float(numbers[cell]))

    def mean(first: int, end: int) -> float | None:
        total, number = before[:, end] - before[:, first]
        return float(total / number) if number else None

    edges = [0, _CELLS]
    while len(edges) <= levels.numel():
        parts = []
        for first, end in itertools.pairwise(edges):
            middle = mean(first, end)
            bound = int(_magnitudes(np.array([middle or 0.0])).view(np.uint32)[0])
            above = (max(bound - low, 0) >> shift) + 1
            parts += [first, end if middle is None else min(max(above, first), end)]
        edges = [*parts, _CELLS]
    level = np.float32(0)
    for i, (first, end) in enumerate(itertools.pairwise(edges)):
        found = mean(first, end)
        level = level if found is None else max(level, np.float32(found))
        levels[i] = float(level)


def codes_of(x: np.ndarray, levels: np.ndarray, bits: int) -> np.ndarray:
    """Return the codes of values: the number of the nearest level, and a sign."""
    half = np.float32(0.5)
    middles = levels[:-1] * half + levels[1:] * half
    return np.searchsorted(middles, _magnitudes(x), side="left") | (x < 0).astype(np.int64) << bits - 1
