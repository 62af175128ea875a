"""Show on this machine what compression saves: time on a slow link where there can be one, else bytes.

Trains a small character model with two Horovod ranks, once for each method. With root the ranks run on two
emulated hosts with links of 100 Mbit/s, and the picture shows the loss over seconds; without root it shows the
loss over megabytes sent. Any failed run, and any difference between the ranks, is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import plot
import table
from display import Display
from files import give_to_caller, write_whole
from records import write_json

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the benchmarks, whose lab makes slow links

from benchmarks.lab import LabError
from benchmarks.launch import JobFailed, Launcher, open_launcher

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "demo"
TRAIN = ROOT / "examples" / "train.py"
TASK, RANKS, RATE = "text", 2, "100mbit"
METHODS = ("horovod-none", "fp16", "global_qsgd", "marsit")  # the first is what the others are compared with
STEPS, QUICK_STEPS = 100, 10
# The best of four without compression, on average over four seeds: docs/benchmarks.md.
LEARNING_RATE = 7e-4
EVALUATIONS = 10
LIMIT = 400.0  # seconds of wall clock for one method, starting Horovod included
NEXT = (
    "Next: add one argument to your own hvd.DistributedOptimizer, "
    "compression=hvc.Compression.marsit(model.named_parameters()), as in "
    "examples/minimal.py, and measure what your hosts would gain: "
    "horovodrun -np 4 -H host1:2,host2:2 hvd-compress headroom"
)

Record = dict[str, Any]


def main() -> None:
    chosen = arguments()
    # A polite kill must end the running job too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        records = measure(chosen)
        problems = [text for record in records if (text := problem(record, chosen.out))]
        report(records, problems, chosen)
    except (JobFailed, LabError) as failure:
        fail([str(failure)])
    except KeyboardInterrupt:
        fail(["interrupted"], status=130)
    finally:
        give_to_caller(chosen.out, ROOT)
    if problems:
        fail(problems)
    print(f"\n{NEXT}", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps: shows that it runs, not how well it learns")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated; the first is the baseline")
    parser.add_argument(
        "--where",
        choices=("auto", "lab", "here"),
        default="auto",
        help="lab: on emulated hosts with slow links; here: on this machine alone; auto (default): lab if possible",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the results")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON instead of a table")
    chosen = parser.parse_args()
    chosen.methods, chosen.out = chosen.methods.split(","), chosen.out.resolve()
    try:
        chosen.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {chosen.out}: {error.strerror}")
    return chosen


def measure(chosen: argparse.Namespace) -> list[Record]:
    """Train with every method and return the records, all from the same place.

    Raises:
        JobFailed: a run failed.
        LabError: there is no slow link, and nothing else will do.
    """
    display = Display(len(chosen.methods) * steps(chosen.quick))
    display.say(f"{len(chosen.methods)} runs of {RANKS} ranks on {os.cpu_count()} cores; logs in {shown(chosen.out)}")
    try:
        if chosen.where != "here":
            try:
                return measure_at("lab", chosen, display)
            except LabError as error:
                if chosen.where == "lab":
                    raise
                display.say(f"No slow link, so the picture shows bytes instead of seconds: {error}")
                display.begin_again()
        return measure_at("here", chosen, display)
    finally:
        display.close()


def measure_at(where: str, chosen: argparse.Namespace, display: Display) -> list[Record]:
    """Train with every method in the network lab ("lab"), or with horovodrun ("here")."""
    with open_launcher(where, RANKS, RATE if where == "lab" else None) as launcher:
        return [measure_one(launcher, method, chosen, display) for method in chosen.methods]


def measure_one(launcher: Launcher, method: str, chosen: argparse.Namespace, display: Display) -> Record:
    """Train with one method and return its record."""
    stem, count = chosen.out / f"{TASK}-{method}", steps(chosen.quick)
    path = stem.with_suffix(".json")
    path.unlink(missing_ok=True)  # an old record must never pass for a new one
    words = ["--task", TASK, "--method", method, "--steps", str(count), "--seed", str(chosen.seed)]
    # A constant rate makes so short a training end anywhere: another text of nearly the same words, or another method.
    words += ["--lr", str(LEARNING_RATE), "--lr-schedule", "cosine"]
    words += ["--eval-every", str(max(1, count // EVALUATIONS)), "--json", str(path)]
    if not method.startswith("horovod-"):  # stock Horovod takes no options
        words += ["--option", f"total_steps={count}"]
    display.start(method)
    began = time.monotonic()
    launcher.run(f"{TASK} {method}", [str(TRAIN), *words], LIMIT, display.line, stem.with_suffix(".log"))
    record: Record = json.loads(path.read_text()) | {"place": launcher.describe()}
    write_json(str(path), record)
    display.done(count, f"{method:14} {table.result(record):24} {time.monotonic() - began:3.0f} s")
    return record


def steps(quick: bool) -> int:
    return QUICK_STEPS if quick else STEPS


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
    headings = table.headings(records)
    summary = {
        "problems": problems,
        "finding": plot.finding(records),
        "runs": [dict(zip(headings, row, strict=True)) for row in table.rows(records)],
        "records": records,
    }
    text = table.render(records)
    write_whole(chosen.out / "table.txt", lambda path: path.write_text(text + "\n"))
    write_json(str(chosen.out / "summary.json"), summary)
    plot.save(records, chosen.out / "demo.png")
    print(json.dumps(summary, indent=1) if chosen.json else f"\n{text}\n\n{summary['finding']}.\n")
    for name, what in (("demo.png", "the picture"), ("table.txt", "this table"), ("summary.json", "everything")):
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
