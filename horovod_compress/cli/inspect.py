"""Say which rank stopped first, from the flight records of a job that failed.

    HVC_DUMP_DIR=/shared/records horovodrun -np 4 ... python train.py
    hvd-compress inspect /shared/records

Each rank that fails writes its last 256 events to that folder, as rank0.json and so on; without the variable nothing
is written. If the hosts share no folder, copy all files into one. A rank that was killed or frozen leaves no record,
which is how it stands out; nor does one whose own program ended, but the others' records say so. Clocks of hosts may
differ, so compare times with care. Where records of several runs are in the folder, those of the newest one are read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, NoReturn

from ..errors import one_line
from ..observe.files import MOST_RANKS, checked_note, is_count
from .common import refuse

_refuse = partial(refuse, "inspect")
_SUSPICIOUS_SECONDS = 600.0
_MOST_BYTES = 1 << 22  # one that is written has some 30 KB
_MOST_SECONDS = 1e11
_MOST_IN_A_CELL = 80


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder."""
    parser.add_argument("folder", help="the folder with the ranks' records, HVC_DUMP_DIR of the job")


def run(arguments: argparse.Namespace) -> int:
    """Print what the records say; return 0, or 2 where there are none."""
    from ..engine.agreement import notes

    folder = Path(arguments.folder)
    if not arguments.folder or not folder.is_dir():  # an empty name is that of a variable that is not set
        return _refuse(f"{arguments.folder!r} is not a folder; give the one that HVC_DUMP_DIR named in the job")
    records, problems = read(folder)
    if not records:
        also = "".join(f"\n  {problem}" for problem in problems)
        return _refuse(f"{folder} contains no flight records, which are files such as rank0.json{also}")
    first = min(record.time for record in records)
    world = world_size(records)
    left = {rank: why for record in records for rank, why in record.left.items() if rank < world}
    told = notes.with_words({record.rank: record.note for record in records}, left)
    absent = missing(records)
    ranks = [
        {
            "rank": record.rank,
            "host": record.host,
            "seconds": record.time - first,
            "last_event": record.last,
            "last_finished": record.note.get("finished"),
            "failure": record.failure,
        }
        for record in records
    ]
    found = {
        "ranks": ranks,
        "world": world,
        "without_record": absent,
        "left": left,
        "first": notes.first(told, world),
        "verdict": notes.verdict(told, world),
        "problems": problems,
    }
    print(json.dumps(found) if arguments.json else text(found))
    return 0


def text(found: dict[str, Any]) -> str:
    """Return the findings for people."""
    lines = [f"{'rank':>4}  {'host':16}  {'failed':>9}  {'last finished':24}  last event"]
    for rank in found["ranks"]:
        finished = rank["last_finished"]
        told = f"bucket {finished[1]} of step {finished[0]}" if finished else "not known"
        lines.append(
            f"{rank['rank']:4}  {rank['host']:16.16}  {rank['seconds']:+7.2f} s  {told:24}  {rank['last_event']}"
        )
    absent, left = found["without_record"], found["left"]
    lines += [f"{rank:>4}  no record: {left[rank]}" for rank in absent if rank in left]
    silent = _runs([rank for rank in absent if rank not in left])
    lines += [f"{ranks:>4}  no record: killed, frozen, or did not fail" for ranks in silent]
    lines += ["", found["verdict"]]
    chosen = [rank for rank in found["ranks"] if rank["rank"] in found["first"]] or found["ranks"][:1]
    lines += [f"Rank {rank['rank']} said: {rank['failure']}" for rank in chosen]
    lines += [f"Note: {problem}." for problem in found["problems"]]
    return "\n".join(lines)


def _runs(ranks: Sequence[int]) -> list[str]:
    """Return ranks in order as they are, but three or more that follow each other as ``5-9``."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and rank == found[-1][-1] + 1:
            found[-1].append(rank)
        else:
            found.append([rank])
    return [text for run in found for text in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]


# ---- flight records ---------------------------------------------------------------------------


@dataclass(frozen=True)
class FlightRecord:
    """What one rank wrote when it failed.

    Attributes:
        time: of the failure, by this rank's own clock.
        world: number of ranks, 0 if that is not known.
        last: the last event in words.
        note: what the rank told the others, empty if it told nothing.
        left: why others had left by themselves, by rank, as far as this one had heard of them.
        run: what all ranks of one run call it; empty if that is not known.
    """

    rank: int
    time: float
    world: int
    host: str
    failure: str
    last: str
    note: Mapping[str, Any]
    left: Mapping[int, str]
    run: str


def read(folder: Path) -> tuple[list[FlightRecord], list[str]]:
    """Return the records of a folder by rank, and what is wrong with files that are none.

    A record is what somebody copied into a folder: it may be damaged, be no file at all, or say what no rank wrote. So
    each is read for itself, up to a size, and checked field by field; texts come out in one line.
    """
    records, problems = [], []
    for path in sorted(folder.glob("rank*.json")):
        try:
            record = _record(_document(path))
            number = re.fullmatch(r"rank(\d{1,9})\.json", path.name, re.ASCII)
            if number and int(number[1]) != record.rank:  # it would take that one's place
                raise ValueError(f"it says that it is of rank {record.rank}")
            records.append(record)
        except (OSError, ValueError, RecursionError) as error:  # the second is of JSON and of Unicode too
            nested = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
            why = error.strerror if isinstance(error, OSError) else nested
            problems.append(f"{one_line(path.name, _MOST_IN_A_CELL)} is not a flight record: {one_line(why)}")
    records, older = _of_newest_run(records)
    if older:
        ranks = ", ".join(_runs(sorted({record.rank for record in older})))
        problems.append(f"the records of rank(s) {ranks} are of a run that failed earlier, and are left out")
    world = world_size(records)
    outside = [record.rank for record in records if record.rank >= world]
    problems += [f"rank {rank} has a record, but most others are of a job of {world} ranks" for rank in outside]
    records = [record for record in records if record.rank < world]
    times = Counter(record.rank for record in records)
    problems += [f"rank {rank} has several records" for rank, number in sorted(times.items()) if number > 1]
    records.sort(key=lambda record: record.rank)
    if records and max(r.time for r in records) - min(r.time for r in records) > _SUSPICIOUS_SECONDS:
        problems.append("the records are more than ten minutes apart: some may come from an earlier failure")
    return records, problems


def _of_newest_run(records: Sequence[FlightRecord]) -> tuple[list[FlightRecord], list[FlightRecord]]:
    """Return the records of the run that failed last, and the others."""
    ends: dict[str, dict[str, float]] = {}  # by run, and by host, each by its own clock
    for record in records:
        of_run = ends.setdefault(record.run, {})
        of_run[record.host] = max(record.time, of_run.get(record.host, 0.0))
    newest = reduce(partial(_later, ends), ends) if ends else ""
    return [r for r in records if r.run == newest], [r for r in records if r.run != newest]


def _later(ends: Mapping[str, Mapping[str, float]], one: str, other: str) -> str:
    """Return the run that failed later: by the clocks of the hosts that both were on, where there are any."""
    both = ends[one].keys() & ends[other].keys() or ends[one].keys() | ends[other].keys()
    return max(one, other, key=lambda run: max(end for host, end in ends[run].items() if host in both))


def world_size(records: Sequence[FlightRecord]) -> int:
    """Return the number of ranks, as most records have it; a job has at least the ranks that say nothing of it."""
    told = Counter(record.world for record in records if record.world)
    if not told:
        return max((record.rank + 1 for record in records), default=0)
    return max(told, key=lambda world: (told[world], -world))


def missing(records: Sequence[FlightRecord]) -> list[int]:
    """Return the ranks that have left no record, of those that are known to have been there."""
    return sorted(set(range(world_size(records))) - {record.rank for record in records})


# ---- one record ----


def _document(path: Path) -> Mapping[str, Any]:
    """Return what is in a file; a device or a pipe would be read without end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES >> 20} MiB")

    def refuse_constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number")

    found = json.loads(data.decode(), parse_constant=refuse_constant)
    if not isinstance(found, dict):
        raise ValueError(f"it is no object but {type(found).__name__}")
    return found


def _record(found: Mapping[str, Any]) -> FlightRecord:
    _must("rank", found.get("rank"), is_count(found.get("rank"), MOST_RANKS), f"a rank below {MOST_RANKS}")
    world, time, events = found.get("world", 0), found.get("time"), found.get("events")
    _must("world", world, is_count(world, MOST_RANKS + 1), f"a number of ranks, at most {MOST_RANKS}")
    _must("rank", found["rank"], found["rank"] < (world or MOST_RANKS), f"one of the {world} of its job")
    right = type(time) in (int, float) and 0 <= time <= _MOST_SECONDS  # type: ignore[operator]
    _must("time", time, right, "a number of seconds")
    _must("failure", found.get("failure"), isinstance(found.get("failure"), str), "a text")
    _must("host", found.get("host", ""), isinstance(found.get("host", ""), str), "a text")
    _must("run", found.get("run", ""), isinstance(found.get("run", ""), str), "a text")
    _must("left", found.get("left", {}), _are_words(found.get("left", {})), "texts by rank")
    _must("events", events, isinstance(events, list) and all(map(_is_event, events)), "a list of events")
    assert isinstance(events, list) and isinstance(time, (int, float))
    last = "nothing yet"
    if events:
        event, hop = events[-1], events[-1]["hop"]
        said = f"{one_line(event['event'], _MOST_IN_A_CELL)}{f' {hop}' if hop >= 0 else ''}"
        last = f"{said} of bucket {event['bucket']}, step {event['step']}"
    host, failure = one_line(found.get("host", ""), _MOST_IN_A_CELL), one_line(found["failure"])
    left = {int(rank): one_line(why) for rank, why in found.get("left", {}).items()}
    note, run = checked_note(found.get("note")), found.get("run", "")
    return FlightRecord(found["rank"], float(time), world, host, failure, last, note, left, run)


def _must(name: str, value: object, right: bool, expected: str) -> None:
    if not right:
        plain = isinstance(value, (str, int, float))
        shown = one_line(ascii(value), _MOST_IN_A_CELL) if plain else type(value).__name__
        raise ValueError(f"{name} should be {expected}, got {shown}")


def _are_words(found: Any) -> bool:
    """Return whether these are texts by rank, whose numbers JSON has as texts."""
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        return False
    return all(re.fullmatch(r"\d{1,5}", rank, re.ASCII) for rank in found)


def _is_event(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("event"), str):
        return False
    hop = found.get("hop")
    return is_count(found.get("step")) and is_count(found.get("bucket")) and (hop == -1 or is_count(hop))
