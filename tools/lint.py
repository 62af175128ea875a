"""Checks everything that needs no test run: format, faults, types, stubs, spelling and links, all at the same time.

python tools/lint.py          what `make lint` runs
python tools/lint.py --fix    what `make format` runs: fixes what can be fixed automatically
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent  # not resolved: .venv/bin/python is a link
NATIVE = ("csrc", "tests")
_FORMAT = "make format"


class Check(NamedTuple):
    """One command that must succeed, and what to do when it does not."""

    name: str
    command: Sequence[str | Path]
    remedy: str


class Result(NamedTuple):
    """How a check ended."""

    check: Check
    status: int
    output: str
    seconds: float


def native_sources() -> list[Path]:
    """Return the C++ and CUDA sources."""
    found = (path for folder in NATIVE for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in found if path.suffix in (".c", ".h", ".cpp", ".cu"))


def checks() -> list[Check]:
    """Return all checks, the longest first."""
    python = [sys.executable]
    return [
        Check("types: mypy", [*python, "-m", "mypy"], "correct the types; [tool.mypy] is in pyproject.toml"),
        *(
            Check(f"stubs of {module}", [*python, "-m", "mypy.stubtest", f"horovod_compress.{module}"], remedy)
            for module, remedy in (("_cpu", "edit horovod_compress/_cpu.pyi"), ("_cuda", "edit _cuda.pyi beside it"))
            if list((ROOT / "horovod_compress").glob(f"{module}.*.so"))
        ),
        Check("spelling: codespell", [BIN / "codespell"], "correct it, or add the word to [tool.codespell]"),
        Check("C++ format", [BIN / "clang-format", "--dry-run", "-Werror", *native_sources()], _FORMAT),
        Check("Python: ruff", [BIN / "ruff", "check", "--quiet"], f"{_FORMAT} fixes some; `ruff rule CODE` explains"),
        Check("Python format", [BIN / "ruff", "format", "--check", "--quiet"], _FORMAT),
        Check(
            "workflows: zizmor", [BIN / "zizmor", "--offline", "--quiet", ".github/workflows"], "see its audits page"
        ),
        Check("links", [*python, ROOT / "tools" / "check_links.py"], "correct the link, or the heading"),
    ]


def fixes() -> list[Check]:
    """Return the commands that fix, in this order."""
    return [
        # What is left is for `make lint` to say.
        Check("Python: ruff", [BIN / "ruff", "check", "--fix-only", "--quiet"], "see above"),
        Check("Python format", [BIN / "ruff", "format", "--quiet"], "see above"),
        Check("C++ format", [BIN / "clang-format", "-i", *native_sources()], "see above"),
    ]


def run(check: Check) -> Result:
    """Run one check."""
    began = time.monotonic()
    # Without colours and line breaks for a terminal that is not there.
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    try:
        ended = subprocess.run(
            check.command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except FileNotFoundError as error:
        missing = f"{error.filename} is missing: `make lint` installs it, or pip install -e .[lint]"
        return Result(check, 127, missing, 0.0)
    return Result(check, ended.returncode, ended.stdout + ended.stderr, time.monotonic() - began)


def report(result: Result) -> None:
    """Print one line, or all that a failed check said and what to do."""
    if result.status == 0:
        print(f"ok      {result.check.name:24} {result.seconds:5.1f} s", flush=True)
        return
    print(f"FAILED  {result.check.name}\n\n{result.output.strip()}\n\n  to fix it: {result.check.remedy}\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="fix what can be fixed automatically, instead of checking")
    if parser.parse_args(arguments).fix:
        results = [run(fix) for fix in fixes()]
        for result in results:
            report(result)
    else:
        results = side_by_side(checks())
    failed = [result.check.name for result in results if result.status != 0]
    if failed:
        print(f"{len(failed)} of {len(results)} checks failed: {', '.join(failed)}")
    return 1 if failed else 0


def side_by_side(wanted: Sequence[Check]) -> list[Result]:
    """Run checks at the same time, one for each core; report each when it has ended."""
    results = []
    with ThreadPoolExecutor(max_workers=max(2, len(os.sched_getaffinity(0)))) as pool:
        for ended in as_completed([pool.submit(run, check) for check in wanted]):
            results.append(ended.result())
            report(results[-1])
    return results


if __name__ == "__main__":
    sys.exit(main())
