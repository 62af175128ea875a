"""Compares the speed of kernels and of a step with what was recorded, and fails where something has become slower.

    make bench-check                    # compare; two minutes, on a quiet machine
    make bench-check ARGS=--record      # record the speed of this checkout, on a processor that has no record or anew

Times are never compared, but ratios within one run: of a kernel, and of a step of two ranks in one process, to the
triad (memory) and to a loop that stays in the cache (processor), measured right after it. So a machine that is slow
today does not matter. A case has become slower if both ratios say so, by more than 18 % and by more than three times
the standard errors of this run and of the record. Where that seems so, or cannot be told, a second measurement decides.

Kernels are measured with every instruction set from AVX2 on that the processor has. Records are kept by processor and
instruction set in benchmarks/recorded.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import ROOT, commit, processor, spread, table
from horovod_compress import ops
from horovod_compress.observe.files import replace_whole

RECORDED = ROOT / "benchmarks" / "recorded.json"
COUNT = 6_000_000  # elements: more than fit into a cache, and little enough for many rounds
ROUNDS, PASSES = 15, 5
TENSORS, STEP = 161, "a step of marsit, two ranks"
LEAST, ERRORS = 0.18, 3.0
#: Where three errors are more than this, nothing can be said of a slowdown that matters.
MOST = 0.30

#: Ratios to one or two yardsticks, each with its relative standard error.
Ratios = list[tuple[float, float]]


# ---- judging -----------------------------------------------------------------------------------


def ratios(times: Sequence[float], *yardsticks: Sequence[float]) -> Ratios:
    """Return the medians of ratios of times to those of yardsticks in the same turns, with their standard errors."""
    found = []
    for yardstick in yardsticks:
        values = spread([mine / its for mine, its in zip(times, yardstick, strict=True)])
        error = 0.93 * (values.q3 - values.q1) / math.sqrt(len(times))  # that of a median, of values near normal
        found.append((values.median, error / values.median))
    return found


def pooled(passes: Sequence[Mapping[str, Ratios]]) -> dict[str, Ratios]:
    """Return what several processes have measured as one: what differs, as memory lies elsewhere, is noise."""
    found: dict[str, Ratios] = {}
    for name in passes[0]:
        each = []
        for several in zip(*(one[name] for one in passes), strict=True):
            values, errors = [value for value, _ in several], [error for _, error in several]
            middle = statistics.median(values)
            each.append((middle, max(*errors, (max(values) - min(values)) / middle / ERRORS)))
        found[name] = each
    return found


@dataclass(frozen=True)
class Verdict:
    """What became of one case.

    Attributes:
        change: of the ratio that has grown less, 0.3 for 30 % slower.
        margin: what of it may be noise.
    """

    name: str
    change: float
    margin: float

    @property
    def slower(self) -> bool:
        return self.change > self.margin

    @property
    def unclear(self) -> bool:
        return not self.slower and self.margin > MOST

    def words(self) -> str:
        said = "SLOWER" if self.slower else "too noisy to tell" if self.unclear else ""
        return f"{self.change:+.0%} (noise {self.margin:.0%}) {said}".rstrip()


def judge(name: str, now: Ratios, before: Ratios) -> Verdict:
    """Compare ratios with recorded ones."""
    each = []
    for (ratio, error), (recorded, its_error) in zip(now, before, strict=True):
        each.append((ratio / recorded - 1, max(LEAST, ERRORS * math.hypot(error, its_error))))
    change, margin = min(each, key=lambda found: found[0] - found[1])
    return Verdict(name, change, margin)


Measure = Callable[[Sequence[str]], dict[str, Ratios]]


def compare(measure: Measure, before: Mapping[str, Ratios]) -> tuple[dict[str, Ratios], list[Verdict]]:
    """Measure and judge; where something seems slower or cannot be told, a second measurement decides.

    Args:
        measure: takes the names of cases, none for all.
    """
    found = measure([])
    verdicts = {name: judge(name, now, before[name]) for name, now in found.items() if name in before}
    if doubtful := [name for name, verdict in verdicts.items() if verdict.slower or verdict.unclear]:
        for name, now in measure(doubtful).items():
            verdicts[name] = judge(name, now, before[name])
    return found, list(verdicts.values())


# ---- measuring ---------------------------------------------------------------------------------


def measure_kernels(names: Sequence[str]) -> dict[str, Ratios]:
    """Time kernels beside the triad and a loop in the cache, in turns; on one thread."""
    import torch

    from benchmarks import kernel_cases

    torch.set_num_threads(1)
    every = [*kernel_cases.cases(kernel_cases.Arrays(COUNT), ""), kernel_cases.Case(STEP, 0, step_of_two_ranks())]
    triad = next(case for case in every if case.name == "triad")
    chosen = [
        c for c in every if c is not triad and not kernel_cases.by_others(c.name) and (not names or c.name in names)
    ]
    small = torch.rand(4096)

    def loop() -> None:
        for _ in range(300):
            small.sqrt_()

    times: dict[str, tuple[list[float], list[float], list[float]]] = {case.name: ([], [], []) for case in chosen}
    for case in chosen:
        case.run()
    for _ in kernel_cases.rounds(ROUNDS):
        for case in chosen:
            for run, into in zip((case.run, triad.run, loop), times[case.name], strict=True):
                began = time.process_time()  # of all threads: a step has several
                run()
                into.append(time.process_time() - began)
    return {name: ratios(mine, *yardsticks) for name, (mine, *yardsticks) in times.items()}


def step_of_two_ranks() -> Callable[[], None]:
    """Return what does a step of two ranks in this process, with the tensors of a network and no network."""
    import torch

    from horovod_compress.engine.methods import parse
    from horovod_compress.engine.reducer import Reducer
    from horovod_compress.exchange.choose import Choose
    from horovod_compress.exchange.transports.local import Hub
    from horovod_compress.schedule.by_name import make_plan
    from horovod_compress.schedule.plan import TensorSpec

    tensors = [TensorSpec(f"t{number}", (COUNT // TENSORS,), "float32") for number in range(TENSORS)]
    methods, options = parse("marsit", {"schedule": "size:6MB", "full_precision_every": 0, "verify_every": 0})
    plan = make_plan(options.schedule, tensors, options.min_elements, methods.number)
    reducers = [
        Reducer(plan, methods.codecs, transport, Choose(options.exchange, transport.adds), options)
        for transport in Hub(2).transports()
    ]
    grads = [[torch.randn(COUNT // TENSORS) for _ in tensors] for _ in reducers]

    def step() -> None:
        for index in range(TENSORS):
            for reducer, mine in zip(reducers, grads, strict=True):
                number = reducer.offer(index, mine[index])
        for reducer in reducers:
            for index in range(TENSORS):
                reducer.result(index, number)

    return step


def measure_kernels_with(instruction_set: str) -> Measure:
    """Return what does so in a process of its own, with an instruction set."""

    def measure(names: Sequence[str]) -> dict[str, Ratios]:
        command = [sys.executable, "-m", "benchmarks.check", "--kernels", *names]
        environment = os.environ | {"HVC_ISA": instruction_set}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Ratios] = json.loads(done.stdout)
        return found

    return measure


# ---- records and the table ---------------------------------------------------------------------


def instruction_sets() -> list[str]:
    """Return those to measure kernels with, the processor's best first."""
    best = ops.instruction_set()
    return [best, "avx2"] if best == "avx512" else [best]


def read_recorded(path: Path) -> dict[str, dict[str, Ratios]]:
    found: dict[str, dict[str, Ratios]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def record(path: Path, key: str, found: Mapping[str, Ratios]) -> None:
    """Write what was measured."""
    rounded = {name: [(float(f"{a:.4g}"), float(f"{b:.2g}")) for a, b in each] for name, each in found.items()}
    every = read_recorded(path) | {key: rounded}
    lines = [
        f"{json.dumps(key)}: {{\n" + ",\n".join(f"{json.dumps(n)}: {json.dumps(each[n])}" for n in sorted(each)) + "\n}"
        for key, each in sorted(every.items())
    ]
    replace_whole(path, "{\n" + ",\n".join(lines) + "\n}\n")


def show(title: str, found: Mapping[str, Ratios], verdicts: Sequence[Verdict]) -> None:
    said = {verdict.name: verdict.words() for verdict in verdicts}
    rows = [[name, said.get(name, "not recorded")] for name in found]
    print(f"\n{title}\n{table(('case', 'slower by'), rows)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="record what is measured instead of comparing it")
    parser.add_argument("--recorded", type=Path, default=RECORDED, metavar="FILE", help="the file of records")
    parser.add_argument("--kernels", nargs="*", help=argparse.SUPPRESS)  # of this process's instruction set, as JSON
    chosen = parser.parse_args(argv)
    if chosen.kernels is not None:
        print(json.dumps(measure_kernels(chosen.kernels)))
        return 0
    measured: dict[str, Measure] = {f"{processor()}, {name}": measure_kernels_with(name) for name in instruction_sets()}
    before, verdicts, unknown = read_recorded(chosen.recorded), [], []
    for key, measure in measured.items():
        if chosen.record:
            record(chosen.recorded, key, pooled([measure([]) for _ in range(PASSES)]))
            print(f"recorded: {key}, {commit() or 'no commit'}", flush=True)
            continue
        recorded = before.get(key, {})
        found, judged = compare(measure, recorded)
        unknown += sorted(found.keys() ^ recorded.keys()) if recorded else [key]
        show(key, found, judged)
        verdicts += judged
    return _conclude(verdicts, unknown)


def _conclude(verdicts: Sequence[Verdict], unknown: Sequence[str]) -> int:
    """Say what came of it: 1 where something is slower, 3 where that could not be told."""
    slower, unclear = [v.name for v in verdicts if v.slower], [v.name for v in verdicts if v.unclear]
    for key in unknown:
        print(f"bench-check: there is no record to compare for {key}; --record makes one", file=sys.stderr)
    if slower:
        print(f"bench-check: slower than recorded: {', '.join(slower)}", file=sys.stderr)
    if unclear:
        print(
            f"bench-check: too much noise to tell: {', '.join(unclear)}; repeat it on a quiet machine", file=sys.stderr
        )
    return 1 if slower else 3 if unclear or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
