"""Checks the CUDA kernels, and training with them, on a machine with a GPU.

The check is made of parts: kernels against the CPU bit for bit, jobs of several ranks on one GPU, payloads, saved
states, training, timelines, a benchmark, and the kernels under compute-sanitizer. --list shows them all.

Every part leaves its result in build/gpu/parts. A later call continues: it leaves out the parts that are right for
these sources, this GPU and this torch. So a machine that is there for minutes at a time is enough: --limit ends a
call in time. Parts that need Horovod or a second GPU are not run without them, and the report says so.

build/gpu/report.md and report.json hold all results; they are written anew after every part.

Exit status: 0 all parts are right; 1 a part is wrong; 2 no GPU, no kernels, or no part could run; 3 nothing is wrong,
but some parts have not run.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuda_parts import catalogue, machine, report
from cuda_parts.part import LIMIT, Part, chosen
from cuda_parts.process import ROOT, end_left_over
from cuda_parts.result import Results
from cuda_parts.schedule import Schedule

NO_GPU = """\
No CUDA device is visible to torch here (torch {torch}, CUDA {cuda}): run this on a machine with an NVIDIA GPU, with a
torch that is built for CUDA."""
NO_KERNELS = """\
Our kernels do not run here: {error}
  Build them on this machine: make setup CUDA=1; or, without a network but with setuptools, pybind11 and nvcc,
  HVC_CUDA=1 python setup.py build_ext --inplace"""
#: Parts side by side at most; each has a process or four that keep a core busy.
MOST_AT_ONCE = 8


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python tools/cuda_check.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="show the parts and their last results, and run nothing")
    parser.add_argument(
        "--only", metavar="PART", action="append", default=[], help="a part or a group; may be given several times"
    )
    parser.add_argument("--again", action="store_true", help="run parts that are right, too")
    parser.add_argument(
        "--limit", type=seconds, metavar="SECONDS", default=math.inf, help="end this call by then (default: no limit)"
    )
    parser.add_argument(
        "--part-limit", type=seconds, metavar="SECONDS", default=LIMIT, help=f"of each part (default {LIMIT:g})"
    )
    most = max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--at-once", type=int, default=most, help=f"parts side by side (default here: {most})")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "gpu", help="of results and report")
    options = parser.parse_args(argv)
    if options.at_once < 1:
        parser.error(f"--at-once should be at least 1, got {options.at_once}")
    options.folder = options.folder.resolve()
    options.every = catalogue.parts(options.folder, options.part_limit, catalogue.sanitizer(), catalogue.has_horovod())
    try:
        options.parts = chosen(options.every, options.only)
    except ValueError as error:
        parser.error(str(error))
    return options


def seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"should be above zero, got {text}")
    return value


def problem(facts: Mapping[str, Any]) -> str | None:
    """Return why nothing can be run here, or None."""
    if "problem" in facts:
        return str(facts["problem"])
    if not facts.get("GPU"):
        return NO_GPU.format(torch=facts.get("torch"), cuda=facts.get("torch's CUDA"))
    return NO_KERNELS.format(error=facts["no kernels"]) if "no kernels" in facts else None


def say(text: str) -> None:
    print(text, flush=True)


def show(parts: Sequence[Part], results: Results) -> None:
    for part in parts:
        found = results.read(part.name)
        last = "" if found is None else found.result + ("" if results.current(part.name) else ", for other sources")
        say(f"{part.name:18} {last:12} {part.about}")


def check(options: argparse.Namespace, facts: Mapping[str, Any], began: float) -> int:
    """Run what is to be run, and return the exit status."""
    if left := end_left_over(options.folder):
        say(f"from an earlier call: {left}")
    key = machine.key(facts)
    results = Results(options.folder / "parts", key)
    waiting = [part for part in options.parts if options.again or not results.is_right(part.name)]
    # Parts that are wrong again and again must not take the time of a long one that has not run yet.
    waiting.sort(key=lambda part: results.is_wrong(part.name))
    say(f"{facts['GPU']}: {len(waiting)} parts to run, {len(options.parts) - len(waiting)} are right already")

    def write() -> None:
        report.write(options.folder, facts, key, options.every, report.collected(options.every, results))

    write()
    Schedule(results, options.limit, options.at_once, say, write, began).run(waiting)
    found = report.collected(options.parts, results)
    say(f"{report.summary(found)}; see {options.folder / 'report.md'}")
    return report.status(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    began = time.monotonic()
    options = arguments(argv)
    facts = machine.facts()
    if options.list:
        show(options.parts, Results(options.folder / "parts", machine.key(facts)))
        return 0
    if reason := problem(facts):
        print(reason, file=sys.stderr)
        return 2
    # So that whoever ends this call ends all processes of its parts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return check(options, facts, began)


if __name__ == "__main__":
    raise SystemExit(main())
