"""Pairwise coverage: few cells of a matrix, in which every two values that go together meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Cell = tuple[Any, ...]
Pair = tuple[tuple[int, Any], tuple[int, Any]]


def pairs_of(cell: Cell) -> set[Pair]:
    """Return the pairs of values in a cell, each with its column."""
    return set(combinations(enumerate(cell), 2))  # type: ignore[arg-type]


def pairwise_cells(columns: Mapping[str, Sequence[Any]], fits: Callable[..., bool]) -> list[Cell]:
    """Return cells that together hold every pair of values that some possible cell holds.

    Args:
        columns: values by name; the names are arguments of ``fits``.
        fits: returns whether a cell is possible.
    """
    possible = [cell for cell in product(*columns.values()) if fits(**dict(zip(columns, cell, strict=True)))]
    missing = set().union(*map(pairs_of, possible))
    chosen: list[Cell] = []
    while missing:
        best = max(possible, key=lambda cell: len(pairs_of(cell) & missing))  # among as good ones the first
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
