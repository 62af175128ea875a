r"""Eight small trainings as people write them, with every method beside no compression: one table, and what it took.

    python -m benchmarks.recipes                                  # what the file does not have yet, an hour or more
    python -m benchmarks.recipes --only gpt,lora --methods none,marsit
    python -m benchmarks.recipes --table                          # the tables of docs/recipes.md, from the file

Each training is a process of `examples/recipe.py` with one thread, and leaves a line in the file, also when it fails.
What has a line is not done again, so a run that was stopped goes on where it was. Take another file (--json) after a
change of the package. `none` and `marsit` are trained with every seed, other methods with the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures_recipes import draw, markdown
from benchmarks.outcomes import environment
from benchmarks.results import ROOT, Record, append_json, check_targets, commit, header

SCRIPT = ROOT / "examples" / "recipe.py"
FILE = ROOT / "benchmarks" / "recipes.jsonl"
METHODS = "none,marsit,bf16,global_qsgd,qsgd bits=4,topk,powersgd,sparse_binary"
EVERY_SEED = ("none", "marsit")


class Run(NamedTuple):
    """One training."""

    task: str
    method: str
    seed: int


def main(argv: Sequence[str] | None = None) -> int:
    chosen = arguments(argv)
    try:
        check_targets(chosen.json, chosen.plot)
        if not (chosen.table or chosen.plot):
            measure(chosen, argv)
        records = read(chosen.json)
        if not records:
            raise ValueError(f"{chosen.json} holds no training yet; run this command without --table and --plot first")
        if chosen.table:
            print(markdown(records))
        if chosen.plot:
            print(*draw(records, chosen.plot / "recipes"))
    except ValueError as error:
        print(f"recipes: {error}", file=sys.stderr)
        return 2
    return 0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TASK,...", help="of these tasks (default: all)")
    parser.add_argument("--methods", default=METHODS, help=f"comma-separated, with their options (default: {METHODS})")
    parser.add_argument("--seeds", default="1,2,3", help="of none and marsit; others take the first (default: 1,2,3)")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one training (default: 600)")
    parser.add_argument("--quick", action="store_true", help="two steps with little data: shows that everything runs")
    parser.add_argument(
        "--json", type=Path, default=FILE, metavar="FILE", help="the file (default: recipes.jsonl here)"
    )
    parser.add_argument("--table", action="store_true", help="measure nothing; print the file's tables in Markdown")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="measure nothing; draw recipes.svg and .png there")
    return parser.parse_args(argv)


# ---- measuring --------------------------------------------------------------------------------


def measure(chosen: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """Do the trainings that the file does not have, one after the other."""
    recipes = settings(chosen.quick)
    mend(chosen.json)
    known = {key(record) for record in read(chosen.json)}
    todo = [run for run in asked(chosen, list(recipes)) if key(record_of(run, recipes)) not in known]
    if not todo:
        print("recipes: the file has all of these trainings already", file=sys.stderr)
        return
    append_json(chosen.json, [header("recipes", argv)])
    for number, run in enumerate(shown(todo), 1):
        found = record_of(run, recipes) | train(run, chosen) | {"commit": commit()}
        append_json(chosen.json, [found])
        said = found.get("failed") or f"loss {found['loss']}, {found['seconds']:.0f} s"
        print(f"  [{number}/{len(todo)}] {run.task} {run.method}, seed {run.seed}: {said}", file=sys.stderr, flush=True)


def shown(todo: list[Run]) -> Iterator[Run]:
    """Yield the trainings, with a progress bar where somebody watches."""
    if sys.stderr.isatty():
        with suppress(ImportError):
            from tqdm import tqdm

            yield from tqdm(todo, unit="training")
            return
    yield from todo


def settings(quick: bool) -> dict[str, Record]:
    """Return the settings of every recipe by its task."""
    command = [sys.executable, str(SCRIPT), "--list", *(["--quick"] if quick else [])]
    listed = subprocess.run(command, env=os.environ | environment(), capture_output=True, text=True, check=False)
    if listed.returncode:
        raise ValueError(f"{SCRIPT.name} does not start: {last_line(listed.stderr)}")
    return {record["task"]: record for record in map(json.loads, listed.stdout.splitlines())}


def asked(chosen: argparse.Namespace, tasks: list[str]) -> list[Run]:
    """Return the trainings that were asked for: method by method, so that each is complete early.

    Raises:
        ValueError: there is no such task, or a seed is no number.
    """
    wanted = chosen.only.split(",") if chosen.only else tasks
    if unknown := set(wanted) - set(tasks):
        raise ValueError(f"--only takes {', '.join(tasks)}; there is no {', '.join(sorted(unknown))}")
    try:
        seeds = [int(seed) for seed in chosen.seeds.split(",")]
    except ValueError:
        raise ValueError(f"--seeds takes whole numbers with commas between them, not {chosen.seeds!r}") from None
    methods = [" ".join(words.split()) for words in chosen.methods.split(",")]
    return [
        Run(task, method, seed)
        for method in methods
        for task in wanted
        for seed in (seeds if method in EVERY_SEED else seeds[:1])
    ]


def record_of(run: Run, recipes: dict[str, Record]) -> Record:
    """Return what is known of a training before it."""
    recipe = {name: value for name, value in recipes[run.task].items() if name != "task"}
    return {"bench": "recipes", "name": run.method, "task": run.task, "seed": run.seed, "recipe": recipe}


def key(record: Record) -> str:
    """Return what makes a training another one: words that describe the recipe do not."""
    recipe = {name: value for name, value in record["recipe"].items() if name != "said"}
    return json.dumps([record["task"], record["name"], record["seed"], recipe], sort_keys=True)


def train(run: Run, chosen: argparse.Namespace) -> Record:
    """Train in a process of its own, and return what it came to, or why it came to nothing."""
    command = [sys.executable, str(SCRIPT), "--task", run.task, "--run", run.method, "--seed", str(run.seed)]
    began = time.monotonic()
    try:
        ended = subprocess.run(
            command + (["--quick"] if chosen.quick else []),
            env=os.environ | environment(),
            capture_output=True,
            text=True,
            timeout=chosen.limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {chosen.limit:g} s", "loss": None, "seconds": time.monotonic() - began}
    try:
        if ended.returncode == 0:
            record: Record = json.loads(ended.stdout.splitlines()[-1])
            return {name: value for name, value in record.items() if name != "bench"}
    except (ValueError, IndexError):
        pass  # it ended without a record: that is a failure like others
    why = last_line(ended.stderr) or f"ended with status {ended.returncode} and no word"
    return {"failed": why, "loss": None, "seconds": time.monotonic() - began}


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


# ---- the file ---------------------------------------------------------------------------------


def read(path: Path) -> list[Record]:
    """Return the trainings of a file; of several with the same settings, the last."""
    found: dict[str, Record] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):  # a line that was cut off
            record: dict[str, Any] = json.loads(line)
            if record.get("bench") == "recipes" and record["name"] != "header":
                found[key(record)] = record
    return list(found.values())


def mend(path: Path) -> None:
    """End a last line that was cut off, so that the next one is not joined to it."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


if __name__ == "__main__":
    sys.exit(main())
