"""Compare training with and without compression on this machine, in a few minutes.

Trains two small tasks under `horovodrun -np 2`, once for each method, and ends with a
table and a picture. Any failed run, and any difference between the ranks, is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import plot
import table
from display import Display
from files import write_whole
from jobs import Job, JobFailed, run
from records import write_json

FOLDER = Path(__file__).resolve().parent.parent / "build" / "demo"

Record = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """A task, the methods it is trained with, and for how long."""

    task: str
    methods: tuple[str, ...]
    steps: int
    quick_steps: int
    limit: float  # seconds of wall clock for one method, starting Horovod included


# horovod-none is Horovod without this package; none is this package without compression.
EXPERIMENTS = (
    Experiment("digits", ("horovod-none", "none", "fp16", "marsit"), steps=300, quick_steps=100, limit=120),
    Experiment("text", ("none", "fp16", "marsit"), steps=100, quick_steps=30, limit=180),
)


def main() -> None:
    chosen = arguments()
    # A polite kill must end the running job too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        records = measure(chosen)
        problems = [text for record in records if (text := problem(record, chosen.out))]
        report(records, problems, chosen)
    except JobFailed as failure:
        fail([str(failure)])
    except KeyboardInterrupt:
        fail(["interrupted"], status=130)
    if problems:
        fail(problems)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps: does it run, rather than how well")
    parser.add_argument("--methods", help="comma-separated, for both tasks instead of their own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON instead of a table")
    return parser.parse_args()


def measure(chosen: argparse.Namespace) -> list[Record]:
    """Run every task with every method and return the records."""
    asked = chosen.methods.split(",") if chosen.methods else None
    plan = [(experiment, method) for experiment in EXPERIMENTS for method in asked or experiment.methods]
    display = Display(sum(length(experiment, chosen.quick) for experiment, _ in plan))
    display.say(f"{len(plan)} runs of 2 ranks on {os.cpu_count()} cores; logs in {shown(chosen.out)}")
    try:
        return [measure_one(experiment, method, chosen, display) for experiment, method in plan]
    finally:
        display.close()


def measure_one(experiment: Experiment, method: str, chosen: argparse.Namespace, display: Display) -> Record:
    """Run one task with one method and return its record."""
    name = f"{experiment.task} {method}"
    stem = chosen.out / f"{experiment.task}-{method}"
    path, steps = stem.with_suffix(".json"), length(experiment, chosen.quick)
    path.unlink(missing_ok=True)  # an old record must never pass for a new one
    words = ["--task", experiment.task, "--method", method, "--steps", str(steps)]
    words += ["--seed", str(chosen.seed), "--eval-every", str(steps // 10), "--json", str(path)]
    display.start(name)
    began = time.monotonic()
    run(Job(name, 2, words, stem.with_suffix(".log"), experiment.limit), display.line)
    record: Record = json.loads(path.read_text())
    result = table.result(record["final"]) if record["final"]["loss"] is not None else "diverged"
    display.done(steps, f"{name:20} {result:18} {time.monotonic() - began:3.0f} s")
    return record


def length(experiment: Experiment, quick: bool) -> int:
    return experiment.quick_steps if quick else experiment.steps


def problem(record: Record, folder: Path) -> str | None:
    """Return what is wrong with a finished run, if anything."""
    config = record["config"]
    name, log = f"{config['task']} {config['method']}", f"{config['task']}-{config['method']}.log"
    if not record["ranks_identical"]:
        return f"{name}: the ranks ended with different parameters; log: {shown(folder / log)}"
    if record["final"]["loss"] is None:
        return f"{name}: the loss is not a finite number; log: {shown(folder / log)}"
    return None


def report(records: list[Record], problems: list[str], chosen: argparse.Namespace) -> None:
    """Print the table, and write table, summary and picture."""
    summary = {
        "problems": problems,
        "runs": [dict(zip(table.HEADINGS, table.row(record), strict=True)) for record in records],
        "records": records,
    }
    text = table.render(records)
    write_whole(chosen.out / "table.txt", lambda path: path.write_text(text + "\n"))
    write_json(str(chosen.out / "summary.json"), summary)
    plot.save(records, chosen.out / "curves.png")
    print(json.dumps(summary, indent=1) if chosen.json else f"\n{text}\n")
    for name, what in (("table.txt", "this table"), ("curves.png", "the curves"), ("summary.json", "everything")):
        print(f"{what + ':':12} {shown(chosen.out / name)}", file=sys.stderr)


def shown(path: Path) -> str:
    """Return a path as short as it can be said from the current folder."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def fail(problems: list[str], status: int = 1) -> NoReturn:
    for text in problems:
        print(f"demo failed: {text}", file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
