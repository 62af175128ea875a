"""Ranks in words, for messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: List at most this many ranks: nobody reads thousands.
_MOST = 64


def listed(ranks: Iterable[int]) -> str:
    """Return ``0, 2``; of very many the first, and how many more there are."""
    every = list(ranks)
    more = f" and {len(every) - _MOST} more" if len(every) > _MOST else ""
    return ", ".join(map(str, every[:_MOST])) + more


def by_value(values: Sequence[Any] | Mapping[int, Any]) -> str:
    """Return ``rank 0 = 8, ranks 1, 2 = 4`` for the values of all ranks, or by rank."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        ranks.setdefault(repr(value), []).append(rank)
    return ", ".join(f"rank{'s' if len(who) > 1 else ''} {listed(who)} = {value}" for value, who in ranks.items())


def minority(values: Sequence[int]) -> str:
    """Return the ranks whose value is not that of most, in words; among as many, the lowest rank's counts."""
    usual = max(set(values), key=lambda value: (values.count(value), -values.index(value)))
    return listed(rank for rank, value in enumerate(values) if value != usual)
