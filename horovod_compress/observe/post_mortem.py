"""The flight records of the ranks of one failure, read together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SUSPICIOUS_SECONDS = 600.0


@dataclass(frozen=True)
class Record:
    """What one rank wrote when it failed.

    Attributes:
        time: of the failure, by this rank's own clock.
        world: number of ranks, 0 if that is not known.
        last: the last event in words.
        note: what the rank told the others, empty if it told nothing.
    """

    rank: int
    time: float
    world: int
    host: str
    failure: str
    last: str
    note: Mapping[str, Any]
    events: int


def read(folder: Path) -> tuple[list[Record], list[str]]:
    """Return the records of a folder by rank, and what is wrong with files that are none."""
    records, problems = [], []
    for path in sorted(folder.glob("rank*.json")):
        try:
            records.append(_record(json.loads(path.read_text())))
        except (ValueError, TypeError, KeyError, AttributeError) as error:  # the first is of JSON and of Unicode
            problems.append(f"{path.name} is not a flight record: {type(error).__name__}: {error}")
    ranks = [record.rank for record in records]
    problems += [f"rank {rank} has several records" for rank in sorted({r for r in ranks if ranks.count(r) > 1})]
    records.sort(key=lambda record: record.rank)
    if records and max(r.time for r in records) - min(r.time for r in records) > _SUSPICIOUS_SECONDS:
        problems.append("the records are more than ten minutes apart: some may come from an earlier failure")
    return records, problems


def _record(found: Mapping[str, Any]) -> Record:
    events: Sequence[Mapping[str, Any]] = found["events"]
    last = events[-1] if events else {}
    note = found.get("note") or {}
    return Record(
        rank=int(found["rank"]),
        time=float(found["time"]),
        world=int(found.get("world", 0)),
        host=str(found.get("host", "")),
        failure=str(found["failure"]),
        last=_in_words(last) if last else "nothing yet",
        note=note if _is_note(note) else {},
        events=len(events),
    )


def _is_note(note: Any) -> bool:
    """Return whether a rank's place is in its note, and the bucket that it has finished, as they were written."""
    if not isinstance(note, Mapping):
        return False
    return _are_numbers(note.get("place"), 3) and (note.get("finished") is None or _are_numbers(note["finished"], 2))


def _are_numbers(found: Any, count: int) -> bool:
    return isinstance(found, list) and len(found) == count and all(isinstance(part, int) for part in found)


def _in_words(event: Mapping[str, Any]) -> str:
    hop = int(event["hop"])
    return f"{event['event']}{f' {hop}' if hop >= 0 else ''} of bucket {event['bucket']}, step {event['step']}"


def missing(records: Sequence[Record]) -> list[int]:
    """Return the ranks that have left no record, of those that are known to have been there."""
    world = max((record.world for record in records), default=0)
    return sorted(set(range(world)) - {record.rank for record in records})
