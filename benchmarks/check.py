"""Compares the speed of kernels and of a step with those of another commit, and fails where something is slower now.

    make bench-check                              # against HEAD; where no file differs from it, against the one before
    make bench-check ARGS="--base v1.0 sign"      # against a tag; only cases whose name has "sign" in it

The other commit is built in build/bench-check, once. Both versions are loaded into one process, where they take turns
on the same arrays, old new new old: what the machine does meanwhile, it does to both. Each four turns give a ratio, of
processor time. A case is slower if three quarters of its ratios are above 1.12, and once more in a second process.

Kernels are measured with every instruction set from AVX2 on that the processor has.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from benchmarks.results import ROOT, spread, table
from horovod_compress import ops

COUNT = 6_000_000  # elements: more than fit into a cache, and little enough for many rounds
ROUNDS, LEAST_SECONDS = 16, 0.004
TENSORS, STEP = 161, "a step of marsit, two ranks"
SLOWER = 0.12
#: Where half of the ratios are further apart, 30 % could be missed.
APART = 0.40
OURS = ("horovod_compress", "benchmarks")
KERNELS = "horovod_compress._cpu"
MODULE = KERNELS.replace(".", "/") + importlib.machinery.EXTENSION_SUFFIXES[0]

Times = dict[str, list[float]]
Measure = Callable[[Sequence[str]], Times]


# ---- judging -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What became of one case: the quartiles of the new time over the old one, less 1."""

    name: str
    low: float
    median: float
    high: float

    @property
    def slower(self) -> bool:
        return self.low > SLOWER

    @property
    def unclear(self) -> bool:
        return not self.slower and self.high - self.low > APART

    def words(self) -> str:
        said = "SLOWER" if self.slower else "too noisy to tell" if self.unclear else ""
        return f"{self.median:+.0%} ({self.low:+.0%} to {self.high:+.0%}) {said}".rstrip()


def judge(name: str, ratios: Sequence[float]) -> Verdict:
    found = spread(ratios)
    return Verdict(name, found.q1 - 1, found.median - 1, found.q3 - 1)


def compare(measure: Measure) -> list[Verdict]:
    """Measure and judge; where something seems slower or cannot be told, a second measurement decides.

    Args:
        measure: returns ratios of the cases with these names, or of all for none.
    """
    verdicts = {name: judge(name, ratios) for name, ratios in measure([]).items()}
    if doubtful := [name for name, verdict in verdicts.items() if verdict.slower or verdict.unclear]:
        verdicts |= {name: judge(name, ratios) for name, ratios in measure(doubtful).items()}
    return list(verdicts.values())


def conclude(verdicts: Sequence[Verdict]) -> int:
    """Say what came of it: 1 where something is slower, 3 where that could not be told, 2 if nothing was measured."""
    slower, unclear = [v.name for v in verdicts if v.slower], [v.name for v in verdicts if v.unclear]
    if not verdicts:
        print("bench-check: no case that both versions have was chosen, so nothing was measured", file=sys.stderr)
        return 2
    if slower:
        print(f"bench-check: slower than before: {', '.join(slower)}", file=sys.stderr)
    if unclear:
        print(f"bench-check: too much noise to tell: {', '.join(unclear)}; try again later", file=sys.stderr)
    return 1 if slower else 3 if unclear else 0


# ---- measuring ---------------------------------------------------------------------------------


class Version:
    """The package and its benchmarks as another checkout has them, beside our own.

    Args:
        root: of the checkout, with its kernels built.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._modules = root, {KERNELS: kernels_of(root)}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let imports find this version."""
        mine, path = _taken(), list(sys.path)
        sys.modules.update(self._modules)
        sys.path.insert(0, str(self._root))
        try:
            yield
        finally:
            self._modules = _taken()
            sys.modules.update(mine)
            sys.path[:] = path


def kernels_of(root: Path) -> ModuleType:
    """Load the compiled kernels of a checkout beside our own.

    They have a name of their own: asked for a module of a name that it has made before, pybind11 hands out that one.
    """
    spec = importlib.util.spec_from_file_location(f"{root}.{KERNELS}", root / MODULE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _taken() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in OURS}


def measure_both(root: Path, words: Sequence[str], names: Sequence[str]) -> Times:
    """Return the ratios of both versions' times, in turns, on one thread.

    Args:
        words: of the names of cases that are asked for.
        names: of cases, or none for all.
    """
    import torch

    from benchmarks import kernel_cases

    torch.set_num_threads(1)
    other, arrays = Version(root), kernel_cases.Arrays(COUNT)
    with other.active():
        old = cases_of(arrays)
    new = cases_of(arrays)
    chosen = [
        name
        for name in new
        if name in old and (not names or name in names) and (not words or any(word in name for word in words))
    ]
    return {name: ratios_of(old[name], new[name], other.active) for name in chosen}


def ratios_of(
    old: Callable[[], object], new: Callable[[], object], as_old: Callable[[], AbstractContextManager[None]]
) -> list[float]:
    """Return new times over old ones, each of four turns: the shorter ones of two, as nothing makes a run too short."""
    sides = ((old, as_old), (new, nullcontext))
    warm = max(_seconds(*side, 1) for side in sides)
    times = math.ceil(LEAST_SECONDS / max(warm, 1e-6))
    found = []
    for _ in range(ROUNDS):
        first, second, third, last = (_seconds(*sides[side], times) for side in (0, 1, 1, 0))
        found.append(min(second, third) / min(first, last))
    return found


def _seconds(run: Callable[[], object], version: Callable[[], AbstractContextManager[None]], times: int) -> float:
    with version():
        began = time.process_time()  # of all threads: a step has several
        for _ in range(times):
            run()
        return time.process_time() - began


def cases_of(arrays: object) -> dict[str, Callable[[], object]]:
    """Return what runs the kernels and the step of the version that imports find now, by name."""
    from benchmarks import kernel_cases

    try:
        every = kernel_cases.cases(arrays, "")  # type: ignore[arg-type]
    except AttributeError:  # of another time
        every = kernel_cases.cases(kernel_cases.Arrays(COUNT), "")
    return {STEP: step_of_two_ranks()} | {
        case.name: case.run for case in every if not kernel_cases.by_others(case.name)
    }


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


def measure_with(instruction_set: str, root: Path, words: Sequence[str]) -> Measure:
    """Return what does so in a process of its own, with an instruction set."""

    def measure(names: Sequence[str]) -> Times:
        command = [
            sys.executable,
            "-m",
            "benchmarks.check",
            *words,
            "--beside",
            str(root),
            "--names",
            json.dumps(names),
        ]
        environment = os.environ | {"HVC_ISA": instruction_set}
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found: Times = json.loads(done.stdout)
        return found

    return measure


def instruction_sets() -> list[str]:
    """Return those to measure with, the processor's best first."""
    best = ops.instruction_set()
    return [best, "avx2"] if best == "avx512" else [best]


# ---- the other version -------------------------------------------------------------------------


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.strip()


def base_of(asked: str | None) -> str:
    """Return the commit to compare with."""
    usual = "HEAD" if git("status", "--porcelain", "--untracked-files=no") else "HEAD~1"
    return git("rev-parse", "--verify", f"{asked or usual}^{{commit}}")


def built(commit: str) -> Path:
    """Return the folder of a commit's files with its compiled kernels, which are ours where their sources are."""
    root = ROOT / "build" / "bench-check" / commit[:12]
    if not (root / MODULE).exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", root], input=archive, check=True)
        if git("diff", "--name-only", commit, "--", "csrc", "setup.py"):
            print("building its kernels takes minutes ...", flush=True)
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            subprocess.run(command, cwd=root, env=os.environ | {"HVC_CUDA": "0"}, check=True)
        else:
            shutil.copy2(ROOT / MODULE, root / MODULE)
    return root


def show(title: str, verdicts: Sequence[Verdict]) -> None:
    rows = [[verdict.name, verdict.words()] for verdict in verdicts]
    print(f"\n{title}\n{table(('case', 'slower by (quartiles)'), rows)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="WORD", help="measure only cases with one of these in their name")
    parser.add_argument("--base", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--beside", type=Path, help=argparse.SUPPRESS)  # of a process that measures
    parser.add_argument("--names", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.beside:
        print(json.dumps(measure_both(chosen.beside, chosen.words, chosen.names)))
        return 0
    try:
        base = base_of(chosen.base)
    except (OSError, ValueError) as error:
        print(f"bench-check: {error}", file=sys.stderr)
        return 2
    print(f"this checkout against {git('log', '-1', '--format=%h %s', base)}", flush=True)
    root, verdicts = built(base), []
    for name in instruction_sets():
        judged = compare(measure_with(name, root, chosen.words))
        show(name, judged)
        verdicts += judged
    return conclude(verdicts)


if __name__ == "__main__":
    sys.exit(main())
