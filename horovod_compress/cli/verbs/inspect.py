"""Say which rank stopped first, from the flight records of a job that failed.

    HVC_DUMP_DIR=/shared/records horovodrun -np 4 ... python train.py
    hvd-compress inspect /shared/records

Each rank that fails writes its last 256 events to that folder, as rank0.json and so on; without the variable nothing
is written. If the hosts share no folder, copy all files into one. A rank that was killed or frozen leaves no record,
which is how it stands out. Clocks of hosts may differ, so compare times with care.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder."""
    parser.add_argument("folder", type=Path, help="the folder with the ranks' records, HVC_DUMP_DIR of the job")


def run(arguments: argparse.Namespace) -> int:
    """Print what the records say; return 0, or 2 where there are none."""
    from ...engine.agreement import notes
    from ...observe import post_mortem

    if not arguments.folder.is_dir():
        return _refuse(f"{arguments.folder} is not a folder; give the one that HVC_DUMP_DIR named in the job")
    records, problems = post_mortem.read(arguments.folder)
    if not records:
        also = "".join(f"\n  {problem}" for problem in problems)
        return _refuse(f"{arguments.folder} contains no flight records, which are files such as rank0.json{also}")
    first = min(record.time for record in records)
    world = post_mortem.size(records)
    left = {record.rank: record.note for record in records}
    absent = post_mortem.missing(records)
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
        "first": notes.first(left, world),
        "verdict": notes.verdict(left, world),
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
    lines += [f"{ranks:>4}  no record: killed, frozen, or did not fail" for ranks in _runs(found["without_record"])]
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


def _refuse(problem: str) -> int:
    print(f"hvd-compress inspect: {problem}", file=sys.stderr)
    return 2
