"""The Python time of the engine: microseconds for each gradient that is offered, and for each bucket.

Many tiny tensors in one bucket, and each in a bucket of its own, under Horovod (one rank) and DistributedDataParallel:

    gradient = (step with one bucket - step without an exchange) / tensors
    bucket   = (step with a bucket for each tensor - step with one bucket) / (tensors - 1)

Processor time of all threads is counted, so other load on the machine hardly matters. Kernels are in it, but have
next to nothing to do.

    python -m benchmarks.engine_overhead
    python -m benchmarks.engine_overhead --against ../other --json overhead.json

``--against`` takes another checkout of the project, with its kernels built. Runs with either take turns, and what is
printed last is the ratio of the two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Record, append_json, header, spread, spread_fields, table

SCRIPT = Path(__file__).with_name("jobs") / "overhead.py"
CASES = "horovod:1,torch:1,torch:2"
METHODS = "marsit,topk,none"
WHAT = ("gradient", "bucket")
SECONDS = 300.0


class RunFailed(Exception):
    """A rank has ended with an error."""


def run(tree: Path, front: str, ranks: int, asked: Record) -> Record:
    """Run the ranks of one job with a checkout of the package; return the microseconds of each kind, and of a step.

    Raises:
        RunFailed: says what the ranks have printed.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*start, str(SCRIPT), json.dumps(asked | {"front": front})],
        env=os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise RunFailed(done.stderr)
    return figures(json.loads(done.stdout.splitlines()[-1]), asked["params"])


def figures(found: dict[str, list[tuple[float, float]]], tensors: int) -> Record:
    """Return medians over blocks, of processor time and of the time that passed."""
    made: Record = {}
    for at, clock in enumerate(("cpu", "wall")):
        base, single, layerwise = (
            statistics.median(block[at] for block in found[name]) for name in ("base", "single", "layerwise")
        )
        made[f"gradient {clock}"] = (single - base) / tensors
        made[f"bucket {clock}"] = (layerwise - single) / (tensors - 1)
    return made


def compare(
    trees: dict[str, Path], front: str, ranks: int, asked: Record, pairs: int
) -> tuple[dict[str, list[Record]], Record]:
    """Return the figures of every run by checkout, and the ratios of pairs, this checkout by the other."""
    runs: dict[str, list[Record]] = {name: [] for name in trees}
    for number in range(pairs):
        names = list(trees) if number % 2 == 0 else list(reversed(trees))
        for name in names:
            runs[name].append(run(trees[name], front, ranks, asked))
    ratios: Record = {}
    if len(runs) == 2:
        mine, other = runs.values()
        ratios = {
            f"{what} {clock}": [a[f"{what} {clock}"] / b[f"{what} {clock}"] for a, b in zip(mine, other, strict=True)]
            for what in WHAT
            for clock in ("cpu", "wall")
        }
    return runs, ratios


def text_of(values: Sequence[float], digits: int) -> str:
    found = spread(values)
    return f"{found.median:.{digits}f} [{found.q1:.{digits}f}-{found.q3:.{digits}f}]"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", default=CASES, help=f"fronts and ranks (default {CASES})")
    parser.add_argument("--methods", default=METHODS, help=f"names, separated by commas (default {METHODS})")
    parser.add_argument("--params", type=int, default=200, help="number of tensors (default 200)")
    parser.add_argument("--elements", type=int, default=64, help="of each tensor (default 64)")
    parser.add_argument("--steps", type=int, default=10, help="in a block (default 10)")
    parser.add_argument("--blocks", type=int, default=9, help="whose median counts, in each run (default 9)")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each checkout (default 3)")
    parser.add_argument("--against", type=Path, help="another checkout, to be compared with")
    parser.add_argument("--json", type=Path, help="append the records to this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = arguments(argv)
    trees = {"this": ROOT} | ({"other": chosen.against.resolve()} if chosen.against else {})
    records: list[Record] = [header("engine_overhead", argv)]
    rows: list[list[str]] = []
    for case in chosen.cases.split(","):
        front, _, ranks = case.partition(":")
        for method in chosen.methods.split(","):
            asked: dict[str, Any] = {"method": method, **{n: getattr(chosen, n) for n in ("params", "elements")}}
            asked |= {"steps": chosen.steps, "blocks": chosen.blocks}
            try:
                runs, ratios = compare(trees, front, int(ranks or 1), asked, chosen.pairs)
            except RunFailed as error:
                print(f"{case} {method}: {error}", file=sys.stderr)
                return 1
            for what in WHAT:
                cells = [
                    text_of([r[f"{what} {clock}"] for r in runs[name]], 1) for name in runs for clock in ("cpu", "wall")
                ]
                cells += [text_of(ratios[f"{what} cpu"], 3)] if ratios else []
                rows.append([case, method, what, *cells])
            for name, found in runs.items():
                fields = [spread_fields(key.replace(" ", "_"), [run_[key] for run_ in found]) for key in found[0]]
                records.append(
                    {"name": "overhead", "tree": name, "case": case, **asked}
                    | {k: v for f in fields for k, v in f.items()}
                )
            if ratios:
                fields = [spread_fields(key.replace(" ", "_"), values) for key, values in ratios.items()]
                records.append({"name": "ratio", "case": case, **asked} | {k: v for f in fields for k, v in f.items()})
    columns = ["case", "method", "of each", *(f"{name} {clock} us" for name in trees for clock in ("cpu", "wall"))]
    print(table(columns + (["this / other, cpu"] if chosen.against else []), rows))
    if chosen.json:
        append_json(chosen.json, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())
