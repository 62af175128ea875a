"""What a rank has said of its failure, checked: by the time others read it, nobody can ask whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import one_line

#: A frame's header names no more.
MOST_RANKS = 1 << 16
_MOST = 1 << 62  # of steps, buckets and hops


def note(found: Any) -> dict[str, Any]:
    """Return the texts of a rank's note, each in one line, its numbers from 0 and what is true or false; no other part.

    ``place`` and ``finished`` say together how far the rank came: a note without them, or with others, is empty.
    """
    if not isinstance(found, Mapping) or not _are_counts(found.get("place"), 3):
        return {}
    finished = found.get("finished")
    if finished is not None and not _are_counts(finished, 2):
        return {}
    kept = {name: one_line(value) for name, value in found.items() if isinstance(value, str)}
    kept |= {name: value for name, value in found.items() if isinstance(value, bool) or is_count(value)}
    return kept | {"place": list(found["place"]), "finished": finished and list(finished)}


def notes(found: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """Return the notes of several ranks, see :func:`note`."""
    return {rank: note(each) for rank, each in found.items()}


def is_count(found: object, below: int = _MOST) -> bool:
    """Return whether this is a whole number from 0."""
    return type(found) is int and 0 <= found < below


def _are_counts(found: Any, count: int) -> bool:
    return isinstance(found, (list, tuple)) and len(found) == count and all(map(is_count, found))
