"""The flight records of the ranks of one failure, read together.

A record is what somebody copied into a folder: it may be damaged, be no file at all, or say what no rank wrote. So each
is read for itself, up to a size, and checked field by field; texts come out in one line.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import one_line
from .files import MOST_RANKS, checked_note, is_count

_SUSPICIOUS_SECONDS = 600.0
_MOST_BYTES = 1 << 22  # one that is written has some 30 KB
_MOST_SECONDS = 1e11
_MOST_IN_A_CELL = 80


@dataclass(frozen=True)
class FlightRecord:
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


class _NoRecordError(ValueError):
    """Says what is wrong with a record."""


def read(folder: Path) -> tuple[list[FlightRecord], list[str]]:
    """Return the records of a folder by rank, and what is wrong with files that are none."""
    records, problems = [], []
    for path in sorted(folder.glob("rank*.json")):
        try:
            records.append(_named(path.name, _record(_parsed(_text(path)))))
        except (OSError, ValueError, RecursionError) as error:  # the second is of JSON and of Unicode too
            why = error.strerror if isinstance(error, OSError) else _in_words_of(error)
            problems.append(f"{one_line(path.name, _MOST_IN_A_CELL)} is not a flight record: {one_line(why)}")
    world = size(records)
    outside = [record.rank for record in records if record.rank >= world]
    problems += [f"rank {rank} has a record, but most others are of a job of {world} ranks" for rank in outside]
    records = [record for record in records if record.rank < world]
    times = Counter(record.rank for record in records)
    problems += [f"rank {rank} has several records" for rank, number in sorted(times.items()) if number > 1]
    records.sort(key=lambda record: record.rank)
    if records and max(r.time for r in records) - min(r.time for r in records) > _SUSPICIOUS_SECONDS:
        problems.append("the records are more than ten minutes apart: some may come from an earlier failure")
    return records, problems


def size(records: Sequence[FlightRecord]) -> int:
    """Return the number of ranks, as most records have it; a job has at least the ranks that say nothing of it."""
    told = Counter(record.world for record in records if record.world)
    if not told:
        return max((record.rank + 1 for record in records), default=0)
    return max(told, key=lambda world: (told[world], -world))


def missing(records: Sequence[FlightRecord]) -> list[int]:
    """Return the ranks that have left no record, of those that are known to have been there."""
    return sorted(set(range(size(records))) - {record.rank for record in records})


# ---- one record ----


def _text(path: Path) -> str:
    """Return what is in a file; a device or a pipe would be read without end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise _NoRecordError("it is no file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise _NoRecordError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return data.decode()


def _parsed(text: str) -> Mapping[str, Any]:
    found = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(found, dict):
        raise _NoRecordError(f"it is no object but {type(found).__name__}")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise _NoRecordError(f"{word} is no number")


def _in_words_of(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _record(found: Mapping[str, Any]) -> FlightRecord:
    _must("rank", found.get("rank"), is_count(found.get("rank"), MOST_RANKS), f"a rank below {MOST_RANKS}")
    world, time, events = found.get("world", 0), found.get("time"), found.get("events")
    _must("world", world, is_count(world, MOST_RANKS + 1), f"a number of ranks, at most {MOST_RANKS}")
    _must("rank", found["rank"], found["rank"] < (world or MOST_RANKS), f"one of the {world} of its job")
    _must("time", time, _is_time(time), "a number of seconds")
    _must("failure", found.get("failure"), isinstance(found.get("failure"), str), "a text")
    _must("host", found.get("host", ""), isinstance(found.get("host", ""), str), "a text")
    _must("events", events, isinstance(events, list) and all(map(_is_event, events)), "a list of events")
    assert isinstance(events, list) and isinstance(time, (int, float))
    return FlightRecord(
        rank=found["rank"],
        time=float(time),
        world=world,
        host=one_line(found.get("host", ""), _MOST_IN_A_CELL),
        failure=one_line(found["failure"]),
        last=_in_words(events[-1]) if events else "nothing yet",
        note=checked_note(found.get("note")),
        events=len(events),
    )


def _must(name: str, value: object, right: bool, expected: str) -> None:
    if not right:
        plain = isinstance(value, (str, int, float))
        shown = one_line(ascii(value), _MOST_IN_A_CELL) if plain else type(value).__name__
        raise _NoRecordError(f"{name} should be {expected}, got {shown}")


def _named(name: str, record: FlightRecord) -> FlightRecord:
    """Refuse a record of another rank than its file is named by: it would take that one's place."""
    number = re.fullmatch(r"rank(\d{1,9})\.json", name, re.ASCII)
    if number and int(number[1]) != record.rank:
        raise _NoRecordError(f"it says that it is of rank {record.rank}")
    return record


def _is_time(found: object) -> bool:
    return type(found) in (int, float) and 0 <= found <= _MOST_SECONDS  # type: ignore[operator]


def _is_event(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return False
    hop = found.get("hop")
    return is_count(found.get("step")) and is_count(found.get("bucket")) and (hop == -1 or is_count(hop))


def _in_words(event: Mapping[str, Any]) -> str:
    hop = event["hop"]
    said = f"{one_line(event['event'], _MOST_IN_A_CELL)}{f' {hop}' if hop >= 0 else ''}"
    return f"{said} of bucket {event['bucket']}, step {event['step']}"
