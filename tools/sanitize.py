"""Runs the kernels under sanitizers: the kernel tests with those for addresses and undefined behaviour, threads apart.

The compiled module goes to build/sanitize, beside a copy of the package, so nothing else is rebuilt. Further arguments
are pytest's.

python tools/sanitize.py -k golomb
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "sanitize"
PACKAGE = "horovod_compress"
SANITIZERS = "address,undefined"
#: Python and torch keep memory to their end, which is no leak of ours.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "PYTHONMALLOC": "malloc",
}


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def libraries() -> str:
    """Return what has to be loaded first: the sanitizers, and the library whose exceptions they follow."""
    found = (
        subprocess.run([compiler(), f"-print-file-name={name}"], check=True, capture_output=True, text=True)
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    )
    return " ".join(process.stdout.strip() for process in found)


def build() -> None:
    """Compile the module with sanitizers, beside a copy of the package."""
    env = os.environ | {"HVC_SANITIZE": SANITIZERS, "HVC_CUDA": "0"}
    shutil.copytree(ROOT / PACKAGE, BUILD / PACKAGE, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so"))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(BUILD), "--build-temp", str(BUILD)]
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def run_tests(arguments: Sequence[str]) -> int:
    """Run the kernel tests with the module that was built."""
    paths = os.pathsep.join([str(BUILD), str(ROOT)])
    env = os.environ | OPTIONS | {"LD_PRELOAD": libraries(), "PYTHONPATH": paths}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        "tests/kernels",
        "--timeout",
        "1800",
    ]
    return subprocess.run([*command, *arguments], cwd=ROOT, env=env, check=False).returncode


def run_threads() -> int:
    """Run what shares loops among threads under the thread sanitizer."""
    source = ROOT / "csrc" / "fuzz"
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run(["make", "-s", "-j", jobs, "-C", source, f"CXX={compiler()}", "threads"], check=True)
    program = ROOT / "build" / "fuzz" / "threads" / "threads"
    return subprocess.run([program], env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"}, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Run all; return the first status that is not 0."""
    build()
    return run_tests(arguments or ["-q", "-m", "not gpu and not slow"]) or run_threads()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
