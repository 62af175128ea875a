"""Ranks in words, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def listed(ranks: Iterable[int]) -> str:
    """Return ``0, 2``."""
    return ", ".join(map(str, ranks))


def by_value(values: Sequence[Any]) -> str:
    """Return ``rank 0 = 8, ranks 1, 2 = 4`` for the values of all ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"rank{'s' if len(who) > 1 else ''} {listed(who)} = {value}" for value, who in ranks.items())
