r"""Learning quality of every method against no compression: several seeds, equal steps, real jobs or one process.

    python benchmarks/quality.py --task digits --ranks 4 --steps 300 --seeds 1,2,3 \
        --run none --run "marsit full_precision_every=100"

Each run is `METHOD [option=value ...] [--train.py's-options ...]`. The first is what the others are compared
with. With `--keep FILE` every training leaves a line there, and one that has a line is not done again: a long table
can be measured piece by piece. Take another file after a change of the package. With `--one-process`, all ranks train
in examples/virtual_ranks.py, whose options then apply, and share the batch of four ranks: half the time on few cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.horovodrun import Job, JobFailed, run  # noqa: E402

#: What makes a training another one, beside its words and seed.
ASKED = ("task", "shards", "ranks", "steps", "optimizer", "lr", "beta2", "lr_schedule", "one_process")
#: What later ones of these were when a file that is kept does not say so.
_BEFORE = {"beta2": None, "one_process": False}
DEFAULT_RUNS = ["none", "fp16", "bf16", "marsit"]


@dataclass(frozen=True)
class OneProcess(Job):
    """A training whose ranks share a process."""

    def command(self) -> list[str]:
        script = ROOT / "examples" / "virtual_ranks.py"
        return [sys.executable, str(script), "--ranks", str(self.ranks), *self.arguments]


def main() -> None:
    chosen = arguments()
    try:
        rows = [measure(words.split(), chosen) for words in chosen.run or DEFAULT_RUNS]
    except JobFailed as failure:
        sys.exit(f"quality.py: {failure}")
    for row in rows:
        row["against_first"] = compared(row["mean"], rows[0]["mean"], chosen.task)
        print(json.dumps(row) if chosen.json else line(row), flush=True)
    if not all(row["ranks_identical"] for row in rows):
        sys.exit("quality.py: some ranks ended with different parameters")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=("digits", "text", "lstm", "words"), default="digits")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--optimizer", choices=("sgd", "adam", "adamw"), help="default: the task's own")
    parser.add_argument("--lr", type=float, help="default: the task's own for this optimizer")
    parser.add_argument("--beta2", type=float, help="the second beta of adam and adamw (default 0.999)")
    parser.add_argument("--lr-schedule", choices=("constant", "cosine"), default="constant")
    parser.add_argument("--shards", choices=("even", "uneven"), default="even")
    parser.add_argument("--run", action="append", metavar="'METHOD [option=value ...]'")
    parser.add_argument("--one-process", action="store_true", help="train all ranks in one process")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one job")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "quality")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="JSON lines of training runs that need not be repeated"
    )
    parser.add_argument("--json", action="store_true", help="one JSON line per run")
    chosen = parser.parse_args()
    if chosen.one_process and None in (chosen.optimizer, chosen.lr):
        parser.error("--one-process needs --optimizer and --lr")
    return chosen


def measure(words: list[str], chosen: argparse.Namespace) -> dict[str, Any]:
    """Train once per seed and return the mean of the final metric."""
    records = [trained(words, int(seed), chosen) for seed in chosen.seeds.split(",")]
    finals = [math.inf if record["final"] is None else float(record["final"]) for record in records]
    return {
        "bench": "quality",
        "name": " ".join(words),
        "task": chosen.task,
        "shards": chosen.shards,
        "optimizer": records[0]["optimizer"],
        "beta2": chosen.beta2,
        "lr_schedule": chosen.lr_schedule,
        "ranks": chosen.ranks,
        "steps": chosen.steps,
        "seeds": chosen.seeds,
        "lr": records[0]["lr"],
        "metric": records[0]["metric"],
        "finals": finals,
        "mean": statistics.mean(finals),
        "bytes_ratio": records[0]["bytes_ratio"],
        "ranks_identical": all(record["ranks_identical"] for record in records),
    }


def trained(words: list[str], seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what one training came to, from the file that keeps it if it is there."""
    if found := kept(words, seed, chosen):
        return found
    found = train(words, seed, chosen) | {"asked": _asked(words, seed, chosen)}
    if chosen.keep:
        chosen.keep.parent.mkdir(parents=True, exist_ok=True)
        with chosen.keep.open("a") as file:
            file.write("\n" * _cut_off(chosen.keep) + json.dumps(found) + "\n")
    return found


def kept(words: list[str], seed: int, chosen: argparse.Namespace) -> dict[str, Any] | None:
    """Return what one training came to, if the file has it."""
    asked = _asked(words, seed, chosen)
    return next((found for found in read(chosen.keep) if _BEFORE | found["asked"] == asked), None)


def _asked(words: list[str], seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(chosen, name) for name in ASKED} | {"words": words, "seed": seed}


def _cut_off(path: Path) -> bool:
    """Return whether the last line has no end, as a run was killed while it wrote."""
    text = path.read_text()
    return bool(text) and not text.endswith("\n")


def read(path: Path | None) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path and path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # the last one may have been cut off
            yield json.loads(line)


def train(words: list[str], seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train once."""
    extra = next((index for index, word in enumerate(words) if word.startswith("--")), len(words))
    command = ["--task", chosen.task, "--steps", str(chosen.steps), "--seed", str(seed), "--shards", chosen.shards]
    command += ["--lr-schedule", chosen.lr_schedule, *words[extra:]]
    for option in ("optimizer", "beta2", "lr"):
        if (value := getattr(chosen, option)) is not None:
            command += [f"--{option}", str(value)]
    name = f"{' '.join(words)}, seed {seed}"
    log = chosen.out / f"{'-'.join([*(str(getattr(chosen, option)) for option in ASKED), *words, str(seed)])}.log"
    if chosen.one_process:
        found = _in_one_process(OneProcess(name, chosen.ranks, command, log, chosen.limit), words[:extra])
    else:
        found = _with_real_ranks(Job(name, chosen.ranks, command, log, chosen.limit), words[:extra], chosen.steps)
    print(f"  {name}: {found['final']}", file=sys.stderr, flush=True)
    return found


def _with_real_ranks(job: Job, method: list[str], steps: int) -> dict[str, Any]:
    path = job.log.with_suffix(".json")
    path.unlink(missing_ok=True)
    command = [*job.arguments, "--method", method[0], "--eval-every", str(steps), "--json", str(path)]
    for option in method[1:]:
        command += ["--option", option]
    run(replace(job, arguments=command), lambda text: None)
    record: dict[str, Any] = json.loads(path.read_text())
    metric = record["final"]["metric"]
    return {
        "final": record["final"][metric],  # None for a loss that is no number: the run diverged
        "metric": metric,
        "optimizer": record["config"]["optimizer"],
        "lr": record["config"]["lr"],
        "bytes_ratio": times_fewer(record["stats"]),
        "ranks_identical": record["ranks_identical"],
    }


def _in_one_process(job: OneProcess, method: list[str]) -> dict[str, Any]:
    lines: list[str] = []
    run(replace(job, arguments=[*job.arguments, "--run", " ".join(method)]), lines.append)
    record: dict[str, Any] = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    metric = "accuracy" if record["task"] == "digits" else "loss"
    found = {name: record[name] for name in ("optimizer", "lr")} | {"metric": metric, "ranks_identical": True}
    final = record[metric] if math.isfinite(record[metric]) else None
    return found | {"final": final, "bytes_ratio": times_fewer(record)}


def compared(mean: float, first: float, task: str) -> str:
    """Return points of accuracy or per cent of loss, worse is minus."""
    if task == "digits":
        return f"{100 * (mean - first):+.2f} points"
    return f"{100 * (first - mean) / first:+.1f} %"


def times_fewer(stats: dict[str, Any]) -> str:
    """Return how many times fewer bytes were sent than by an uncompressed ring all-reduce."""
    return f"{stats['bytes_dense'] / stats['bytes_sent']:.1f}x" if stats["bytes_sent"] else "-"


def line(row: dict[str, Any]) -> str:
    finals = " ".join(f"{value:.4f}" for value in row["finals"])
    identical = "identical" if row["ranks_identical"] else "DIFFERENT"
    return (
        f"{row['task']:6} {row['optimizer']:5} {row['name']:40} {row['metric']} {row['mean']:.4f} "
        f"({row['against_first']}; {finals})  bytes 1/{row['bytes_ratio']}  ranks {identical}"
    )


if __name__ == "__main__":
    main()
