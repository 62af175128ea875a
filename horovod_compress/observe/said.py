"""What a rank has said of its failure, checked: by the time others read it, nobody can ask whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import one_line

#: A frame's header names no more.
MOST_RANKS = 1 << 16
_MOST = 1 << 62  # of steps, buckets and hops


def note(found: Any) -> dict[str, Any]:
    """Return the parts of a rank's note that are as they were written, texts in one line; of anything else nothing."""
    if not isinstance(found, Mapping):
        return {}
    kept: dict[str, Any] = {name: one_line(value) for name, value in found.items() if isinstance(value, str)}
    kept |= {name: value for name, value in found.items() if isinstance(value, bool) or is_count(value)}
    for name in ("place", "finished", *(() if "where" in kept else ("stuck",))):  # it is said where it is stuck
        kept.pop(name, None)
    if _are_counts(found.get("place"), 3):
        kept["place"] = list(found["place"])
    if "finished" in found and (found["finished"] is None or _are_counts(found["finished"], 2)):
        kept["finished"] = found["finished"] and list(found["finished"])
    if isinstance(operands := found.get("operands"), Mapping):
        kept["operands"] = {one_line(str(name)): one_line(str(value)) for name, value in operands.items()}
    return kept


def notes(found: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """Return the notes of several ranks, see :func:`note`."""
    return {rank: note(each) for rank, each in found.items()}


def is_count(found: object, below: int = _MOST) -> bool:
    """Return whether this is a whole number from 0."""
    return type(found) is int and 0 <= found < below


def _are_counts(found: Any, count: int) -> bool:
    return isinstance(found, (list, tuple)) and len(found) == count and all(map(is_count, found))
