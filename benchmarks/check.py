"""Compares the speed of kernels and of a step with those of another commit, and fails where something is slower now.

    make bench-check                              # against HEAD; where no file differs from it, against the one before
    make bench-check ARGS="--base v1.0 sign"      # against a tag; only cases whose name has "sign" in it

The other commit is built in build/bench-check, once. Each version runs in a process of its own, and they take turns,
old new new old: what the machine does meanwhile, it does to both. Each four turns give a ratio, of processor time. A
case is slower if three quarters of its ratios are above 1.12, and once more in two new processes.

Kernels are measured with every instruction set from AVX2 on that the processor has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, spread, table
from horovod_compress import ops

COUNT = 6_000_000  # elements: more than fit into a cache, and little enough for many rounds
ROUNDS, LEAST_SECONDS = 16, 0.004
SIDE = ROOT / "benchmarks" / "check_side.py"
MOST_SECONDS = 300  # that a process may take to start, or to answer
SLOWER = 0.12
#: Where half of the ratios are further apart, 30 % could be missed.
APART = 0.40

Times = dict[str, list[float]]
Measure = Callable[[Sequence[str]], Times]
Seconds = Callable[[int], float]  # that so many runs take


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


class Side:
    """A process with the kernels and the step of one version, see :mod:`.check_side`.

    Args:
        root: of the checkout that it runs.
        instruction_set: of its kernels.
        count: elements of their arrays.

    Raises:
        ValueError: by what asks it: it has ended, or did not answer.
    """

    def __init__(self, root: Path, instruction_set: str, count: int = COUNT) -> None:
        self._root = root
        mine, other = socket.socketpair()
        mine.settimeout(MOST_SECONDS)
        with mine, other:
            command = [sys.executable, str(SIDE), *map(str, (root, other.fileno(), count))]
            environment = os.environ | {"HVC_ISA": instruction_set}
            self._process = subprocess.Popen(command, cwd=root, env=environment, pass_fds=[other.fileno()])
            self._lines = mine.makefile("rw")  # which keeps the socket open

    @cached_property
    def names(self) -> list[str]:
        """Return those of its cases, once it has made them."""
        names: list[str] = self._answer()
        return names

    def seconds(self, name: str, times: int) -> float:
        """Return the processor time that so many runs of a case take."""
        took: float = self._answer([name, times])
        return took

    def _answer(self, asked: object = None) -> Any:
        try:
            if asked:
                print(json.dumps(asked), file=self._lines, flush=True)
            if answer := self._lines.readline():
                return json.loads(answer)
            said = "it ended"
        except OSError as error:
            said = str(error)
        raise ValueError(f"no answer from the process that measures {self._root}: {said}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):  # what it was asked last and never read
            self._lines.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def measure_both(root: Path, instruction_set: str, words: Sequence[str], names: Sequence[str]) -> Times:
    """Return the ratios of both versions' times, in turns, on one thread.

    Args:
        root: of the older version.
        words: of the names of cases that are asked for.
        names: of cases, or none for all.
    """
    with Side(root, instruction_set) as old, Side(ROOT, instruction_set) as new:
        both = [name for name in new.names if name in old.names]
        asked = [name for name in both if not words or any(word in name for word in words)]
        chosen = [name for name in asked if not names or name in names]
        return {name: ratios_of(partial(old.seconds, name), partial(new.seconds, name)) for name in chosen}


def ratios_of(old: Seconds, new: Seconds) -> list[float]:
    """Return new times over old ones, each of four turns: the shorter ones of two, as nothing makes a run too short."""
    times = math.ceil(LEAST_SECONDS / max(old(1), new(1), 1e-6))
    found = []
    for _ in range(ROUNDS):
        first, second, third, last = (seconds(times) for seconds in (old, new, new, old))
        found.append(min(second, third) / min(first, last))
    return found


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
    if not any(root.glob("horovod_compress/_cpu.*.so")):
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        subprocess.run(["tar", "-x", "-C", root], input=archive, check=True)
        if git("diff", "--name-only", commit, "--", "csrc", "setup.py"):
            print("building its kernels takes minutes ...", flush=True)
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            subprocess.run(command, cwd=root, env=os.environ | {"HVC_CUDA": "0"}, check=True)
        else:
            for module in (ROOT / "horovod_compress").glob("_cpu.*.so"):
                shutil.copy2(module, root / "horovod_compress")
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
    chosen = parser.parse_args(argv)
    try:
        return conclude(check(base_of(chosen.base), chosen.words))
    except (OSError, ValueError) as error:
        print(f"bench-check: {error}", file=sys.stderr)
        return 2


def check(base: str, words: Sequence[str]) -> list[Verdict]:
    """Compare with a commit, with every instruction set, and show what came of it."""
    print(f"this checkout against {git('log', '-1', '--format=%h %s', base)}", flush=True)
    root, verdicts = built(base), list[Verdict]()
    for instruction_set in instruction_sets():
        judged = compare(partial(measure_both, root, instruction_set, words))
        show(instruction_set, judged)
        verdicts += judged
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
