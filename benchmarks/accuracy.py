"""Times training to a result: seconds until a held-out metric is reached, with and without compression.

    python -m benchmarks.accuracy --where lab --rate 100mbit --ranks 4 --task digits --json all.json --plot plots

Real training with examples/train.py and the task's own optimizer and settings, one job for each
method and seed. The first method is the baseline: "horovod" is stock Horovod in float32,
"horovod fp16" its own cast; others are methods of this package, "marsit full_precision_every=100".
Arguments of train.py may follow a method, "marsit --local-steps 10 --outer nesterov".
Seconds are of training steps on rank 0; evaluations are not counted.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import curves
from benchmarks.allreduce import check_names, check_network, place_text, words
from benchmarks.lab import LabError
from benchmarks.launch import JobFailed, Launcher, open_launcher
from benchmarks.results import Record, append_json, check_targets, header, processor, read_json, table

PROGRAM = "python -m benchmarks.accuracy"
METHODS = "horovod,horovod fp16,none,marsit"
STOCK = {"horovod": "horovod-none", "horovod fp16": "horovod-fp16"}
STEPS = {"digits": 300, "text": 300, "lstm": 300}
EVALUATIONS = 40
METRIC = {"digits": "accuracy", "text": "loss", "lstm": "loss"}
COLUMNS = (
    "method",
    "seconds to target, each seed",
    "median s",
    "x baseline",
    "steps",
    "best",
    "ms per step",
    "MB sent",
)
NOTES = f"""\
seconds to target: of training (evaluations not counted) until the held-out metric, the mean of {curves.SMOOTHED_OVER}
                   evaluations in a row, is as good as the target; "-" if it never was in this run's steps
x baseline:        the baseline's median divided by this one's: above 1 is faster
steps, best:       median steps to the target; median of the best smoothed result
ms per step:       training seconds divided by steps, median; MB sent: by rank 0 in the whole run"""


def arguments(argv: Sequence[str] | None, program: str = PROGRAM) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--where", choices=("lab", "here"), default="here", help="network lab, or horovodrun (default)")
    parser.add_argument("--hosts", help="hosts for --where here, in the form of horovodrun -H")
    parser.add_argument("--rate", help="rate of the lab's links, such as 100mbit (default: no limit)")
    parser.add_argument("--delay", help="delay of the lab's links, such as 5ms")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument("--task", choices=sorted(METRIC), default="digits")
    parser.add_argument(
        "--methods", nargs="+", default=[METHODS], help=f"methods, also separated by commas (default {METHODS})"
    )
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, help=f"steps of every run (default {STEPS})")
    parser.add_argument(
        "--eval-every", type=int, help=f"steps between evaluations (default: {EVALUATIONS} evaluations in a run)"
    )
    parser.add_argument("--target", default="auto", help="held-out accuracy (0 to 1) or loss, or auto (default)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one job (default 1800)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots as SVG and PNG files to DIR")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="show FILE's records, measure nothing")
    chosen = parser.parse_args(argv)
    try:
        chosen.methods = [word for text in chosen.methods for word in words(text)]
        chosen.seeds = [int(word) for word in words(chosen.seeds)]
        chosen.target = None if chosen.target == "auto" else float(chosen.target)
    except ValueError as error:
        parser.error(f"--seeds takes whole numbers, --target auto or a number: {error}")
    if not chosen.methods or not chosen.seeds:
        parser.error("--methods and --seeds must not be empty")
    chosen.steps = STEPS[chosen.task] if chosen.steps is None else chosen.steps
    chosen.eval_every = max(1, chosen.steps // EVALUATIONS) if chosen.eval_every is None else chosen.eval_every
    try:
        _check(chosen)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def _check(chosen: argparse.Namespace) -> None:
    if chosen.ranks < 2 or chosen.steps < 1 or chosen.eval_every < 1 or min(chosen.seeds) < 0:
        raise ValueError("--ranks must be at least 2, --steps and --eval-every at least 1, --seeds 0 or more")
    if chosen.target is not None and not math.isfinite(chosen.target):
        raise ValueError(f"--target must be auto or a finite number, got {chosen.target:g}")
    if not 0 < chosen.limit < float("inf"):
        raise ValueError(f"--limit must be a number of seconds above 0, got {chosen.limit:g}")
    for method in chosen.methods:
        before = method.partition(" --")[0]
        if before not in STOCK and (words_left := [word for word in before.split()[1:] if "=" not in word]):
            raise ValueError(f"contestant {method!r}: {words_left[0]!r} is not key=value")
    check_targets(chosen.json, chosen.plot)
    if chosen.source:
        chosen.records = read_json(chosen.source)
    else:
        check_network(chosen.where, [chosen.rate], chosen.delay, chosen.hosts)
        check_names([method.partition(" --")[0] for method in chosen.methods], list(STOCK))


# ---- measuring --------------------------------------------------------------------------------


def train(launcher: Launcher, method: str, seed: int, chosen: argparse.Namespace) -> Record:
    """Train once and return the run's curve.

    Raises:
        JobFailed: the job failed.
    """
    name = f"{method}, seed {seed}"
    outcome = launcher.run(name, train_arguments(method, seed, chosen), chosen.limit)
    if not outcome.records:
        raise JobFailed("\n".join([f"{name}: rank 0 left no record; its last lines:", *outcome.lines[-5:]]))
    return run_record(method, seed, outcome.records[0], launcher.describe())


def train_arguments(method: str, seed: int, chosen: argparse.Namespace) -> list[str]:
    """Return what follows the interpreter: the job around train.py, with the task's own settings."""
    before, _, flags = method.partition(" --")
    name, options = (STOCK[before], []) if before in STOCK else (before.split()[0], before.split()[1:])
    found = ["-m", "benchmarks.jobs.accuracy", "--task", chosen.task, "--method", name, "--seed", str(seed)]
    found += ["--steps", str(chosen.steps), "--eval-every", str(chosen.eval_every)]
    for option in options:
        found += ["--option", option]
    return [*found, *f"--{flags}".split()] if flags else found


def run_record(method: str, seed: int, record: dict[str, Any], place: Record) -> Record:
    """Return what this benchmark keeps of a record of train.py."""
    config, metric = record["config"], record["final"]["metric"]
    points = [{"step": p["step"], "seconds": p["seconds"], "value": p[metric]} for p in record["curve"]]
    return {
        "bench": "accuracy",
        "name": method,
        "task": config["task"],
        "metric": metric,
        "seed": seed,
        "ranks": config["world"],
        "parameters": config["parameters"],
        "optimizer": f"{config['optimizer']} (lr {config['lr']:g}, batch {config['batch']} per rank)",
        "steps": points[-1]["step"],
        "training_seconds": points[-1]["seconds"],
        "bytes_sent": record["stats"]["bytes_sent"],
        "bytes_computed": bool(record["stats"].get("bytes_computed")),
        "ranks_identical": record["ranks_identical"],
        "place": place,
        "curve": points,
    }


def judged(runs: Sequence[Record], target: float | None) -> list[Record]:
    """Return the runs with the target and the seconds to it; the first method is the baseline.

    Raises:
        ValueError: a target cannot be found, as a run has too few evaluations.
    """
    metric, baseline = runs[0]["metric"], runs[0]["name"]
    rule = "given on the command line"
    if target is None:
        first = [run["curve"] for run in runs if run["name"] == baseline]
        others = [run["curve"] for run in runs if run["name"] != baseline]
        target, rule = curves.automatic_target(first, others, metric)
    return [_judged(run, target, rule) for run in runs]


def _judged(run: Record, target: float, rule: str) -> Record:
    seconds = curves.seconds_to(run["curve"], target, run["metric"])
    step = next((p["step"] for p in run["curve"] if seconds is not None and p["seconds"] == seconds), None)
    return run | {"target": target, "target_rule": rule, "seconds_to_target": seconds, "steps_to_target": step}


# ---- showing ----------------------------------------------------------------------------------


def summary(runs: Sequence[Record]) -> list[Record]:
    """Return one record for each method: medians over seeds, and how many times faster than the baseline."""
    found = [_summary(name, [r for r in runs if r["name"] == name]) for name in dict.fromkeys(r["name"] for r in runs)]
    base = found[0]["median_seconds_to_target"]
    for record in found:
        mine = record["median_seconds_to_target"]
        record["times_faster"] = base / mine if base and mine else None
    return found


def _summary(name: str, runs: Sequence[Record]) -> Record:
    one = runs[0]
    bests = [curves.best(run["curve"], one["metric"]) for run in runs]
    return {
        "bench": "accuracy",
        "name": f"summary of {name}",
        "method": name,
        "task": one["task"],
        "place": one["place"],
        "seeds": [run["seed"] for run in runs],
        "target": one["target"],
        "target_rule": one["target_rule"],
        "seconds_to_target": [run["seconds_to_target"] for run in runs],
        "median_seconds_to_target": _median([run["seconds_to_target"] for run in runs]),
        "median_steps_to_target": _median([run["steps_to_target"] for run in runs]),
        "median_best": _median(bests),
        "median_step_seconds": _median([run["training_seconds"] / run["steps"] for run in runs]),
        "bytes_sent": one["bytes_sent"],
        "bytes_computed": one["bytes_computed"],
    }


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median; None if one value is missing, as the run that is slower than all would be left out."""
    known = [value for value in values if value is not None]
    return median(known) if len(known) == len(values) else None


def row(record: Record) -> list[str]:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return [
        record["method"],
        " ".join(number(value, ".2f") for value in record["seconds_to_target"]),
        number(record["median_seconds_to_target"], ".2f"),
        number(record["times_faster"], ".2f"),
        number(record["median_steps_to_target"], ".0f"),
        number(record["median_best"], ".4f"),
        f"{1000 * record['median_step_seconds']:.1f}",
        f"{record['bytes_sent'] / 1e6:.4g}{'*' if record['bytes_computed'] else ''}",
    ]


def text(runs: Sequence[Record]) -> str:
    """Return heading, table and notes."""
    one = runs[0]
    return "\n".join(
        [
            f"{one['task']}, {one['optimizer']}, {one['steps']} steps, {place_text(one['place'])}",
            f"target: held-out {one['metric']} {one['target']:.4f}, {one['target_rule']}; baseline: {one['name']}",
            table(COLUMNS, [row(record) for record in summary(runs)]),
            "",
            NOTES,
        ]
    )


def measure(chosen: argparse.Namespace) -> list[Record]:
    """Train with every method and seed; methods take turns, so that a busy minute does not hit one alone.

    Raises:
        JobFailed, LabError, ValueError: a run failed, or there is no lab.
    """
    runs = []
    with open_launcher(chosen.where, chosen.ranks, chosen.rate, chosen.delay, chosen.hosts) as launcher:
        for seed in chosen.seeds:
            for method in chosen.methods:
                print(f"training {chosen.task}, {method}, seed {seed}", file=sys.stderr, flush=True)
                runs.append(train(launcher, method, seed, chosen))
    order = {method: place for place, method in enumerate(chosen.methods)}
    return judged(sorted(runs, key=lambda run: order[run["name"]]), chosen.target)


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    chosen = arguments(argv, program)
    if chosen.source:
        records = chosen.records
        runs = [record for record in records if "curve" in record]
    else:
        print(f"{processor()}, {os.cpu_count()} cores", flush=True)
        try:
            runs = measure(chosen)
        except (JobFailed, LabError, ValueError) as failure:
            print(f"accuracy: {failure}", file=sys.stderr)
            return 1
        records = [header("accuracy", argv)]
        if chosen.json:
            append_json(chosen.json, [*records, *runs, *summary(runs)])
    print(f"\n{text(runs)}")
    if chosen.plot:
        from benchmarks import figures_training

        for path in figures_training.draw_accuracy(runs, records[0], chosen.plot):
            print(f"wrote {path}")
    if different := sorted({run["name"] for run in runs if not run["ranks_identical"]}):
        print(f"accuracy: some ranks ended with different parameters: {', '.join(different)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
