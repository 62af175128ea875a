"""Runs the tests in two parts: most of them side by side, then those that must run alone.

A test keeps a core busy, so as many run at a time as there are cores, jobs of several ranks among them. What
measures, or kills ranks and counts the seconds, is marked `alone`: nothing else may run beside it. Arguments are
pytest's own, also `-m`, `-k` and paths.

    python tools/run_tests.py -m "not slow" -k marsit
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

PASSED, FAILED, NO_TESTS = 0, 1, 5  # pytest's exit statuses
ALONE = ("tests/parallel", "tests/faults", "tests/unit/test_bench_check.py")  # where such tests are
BYTECODE = Path(__file__).resolve().parents[1] / "build" / "bytecode"
MOST_WORKERS = 8  # a worker holds torch and its samples: about 1 GB


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both parts and return pytest's exit status for the whole."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("-m", dest="markers", default="")
    parser.add_argument("-n", dest="workers", default=str(min(MOST_WORKERS, len(os.sched_getaffinity(0)))))
    parser.add_argument("-k", dest="keywords")  # its value is no path, whatever there is of that name
    options, others = parser.parse_known_args(arguments)
    chosen = f"({options.markers}) and " if options.markers else ""
    # Without a path the second part looks only where its tests are: collecting all of them takes long.
    named = any(Path(other.partition("::")[0]).exists() for other in others)
    keywords = ["-k", options.keywords] if options.keywords else []
    # One file stays in one worker: what its fixtures build is built once. tests/conftest.py sorts the files.
    side_by_side = ["-n", options.workers, "--dist", "loadfile", "--no-loadscope-reorder"]
    return run_parts(
        [
            ["-m", f"{chosen}not alone", *side_by_side, *keywords, *others],
            ["-m", f"{chosen}alone", *keywords, *others, *([] if named else ALONE)],
        ],
        pytest,
        stops=any(other == "-x" or other.startswith(("--exitfirst", "--maxfail")) for other in others),
    )


def pytest(part: Sequence[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *part], env=surroundings(), check=False).returncode


def surroundings() -> dict[str, str]:
    """Return the environment of the tests.

    They start a hundred processes, which must not compile the same modules again and again: who wants no bytecode
    beside the sources gets it in build/. And each core has a worker: torch's threads that wait for each other leave
    theirs to it, where by default they would turn in a loop.
    """
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if environment.pop("PYTHONDONTWRITEBYTECODE", None):
        environment.setdefault("PYTHONPYCACHEPREFIX", str(BYTECODE))
    return environment


def run_parts(parts: Sequence[Sequence[str]], run: Callable[[Sequence[str]], int], stops: bool = False) -> int:
    """Run each part and return the status of the whole.

    A part without tests is no failure (`-k` may choose from the other alone), all parts without tests are one.
    Anything but failed tests, such as an interruption or a wrong argument, ends the run.

    Args:
        stops: failed tests end the run too.
    """
    statuses = []
    for part in parts:
        statuses.append(run(part))
        if statuses[-1] not in (PASSED, FAILED, NO_TESTS) or (stops and statuses[-1] == FAILED):
            return statuses[-1]
    if FAILED in statuses:
        return FAILED
    return PASSED if PASSED in statuses else NO_TESTS


if __name__ == "__main__":
    sys.exit(main())
