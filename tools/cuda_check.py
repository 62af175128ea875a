"""Checks the CUDA kernels on a machine with a GPU: tests, compute-sanitizer, and the benchmark.

The tests compare every kernel with the CPU bit for bit. compute-sanitizer, which comes with the CUDA toolkit,
then runs the shorter of them again: memcheck (memory that is not the kernel's), racecheck (threads that
write what others use), initcheck (memory read before it is written) and synccheck (barriers that not all
threads reach). The benchmark writes build/gpu.json. The last line says what was right.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("-m", "pytest", "tests/kernels/test_cuda.py", "-q", "-m", "gpu", "--timeout", "0")
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
STEPS = ("tests", *SANITIZERS, "benchmark")


def sanitizer() -> str | None:
    """Return compute-sanitizer's path."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer") or shutil.which(f"{home}/bin/compute-sanitizer")


def command(step: str, program: str | None) -> list[str] | None:
    """Return what a step runs; None where it cannot be run."""
    if step == "tests":
        return [sys.executable, *TESTS]
    if step == "benchmark":
        return [sys.executable, "-m", "benchmarks.gpu", "--json", str(ROOT / "build" / "gpu.json")]
    if program is None:
        return None
    # All kernels, torch's too: what a kernel that is not watched writes would count as never written.
    return [program, "--tool", step, "--error-exitcode", "9", sys.executable, *TESTS, "-x"]


def environment(step: str) -> dict[str, str]:
    return {**os.environ, "HVC_TEST_LENGTHS": "short"} if step in SANITIZERS else dict(os.environ)


def has_gpu() -> bool:
    program = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all steps are right, 1 if one is not, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python tools/cuda_check.py", description=__doc__)
    parser.add_argument("--only", choices=STEPS, action="append", help="one step; may be given several times")
    steps = parser.parse_args(argv).only or list(STEPS)
    if not has_gpu():
        print("no CUDA device is visible to torch here: run this on a machine with a GPU", file=sys.stderr)
        return 2
    found = {}
    for step in steps:
        words = command(step, sanitizer())
        if words is None:
            found[step] = "not run: compute-sanitizer was not found, it comes with the CUDA toolkit"
            continue
        print(f"--- {step}", flush=True)
        done = subprocess.run(words, cwd=ROOT, env=environment(step), check=False)
        found[step] = "right" if done.returncode == 0 else f"wrong, exit status {done.returncode}"
    print("\n".join(f"{step}: {result}" for step, result in found.items()))
    return 0 if all(result == "right" for result in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
