"""The tests marked `gpu`: left out where there is no GPU; elsewhere `-m gpu` runs them within a limit, and continues.

    python -m pytest -m gpu -n 4 --limit 480     # again and again, until everything has run

What says most in the least time comes first. Each result is kept as it comes, one JSON object a line: a test that was
right is left out by later calls, as long as sources, GPU and torch are the same. Exit status 6: nothing is wrong, but
some tests have not run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: The order of the files; those that are not named come last.
ORDER = (
    "kernels/test_cuda.py", "battery/test_cuda_steps.py", "unit/test_nccl.py", "parallel/test_device.py",
    "parallel/test_given.py", "parallel/test_learning_on_device.py", "kernels/test_large.py",
)  # fmt: skip
#: What a result holds for, but for what compilers and interpreters have made.
SOURCES = ("csrc", "horovod_compress", "tests", "benchmarks", "examples", "setup.py", "pyproject.toml")
RIGHT, WRONG, NOT_RUN = "passed", "failed", "not run"
INCOMPLETE = 6
_ENDS = "when the tests of a GPU end"
#: Seconds that a test that does not return, such as a kernel that hangs, has to end after the limit.
_GRACE = 60.0


def add_options(parser: pytest.Parser) -> None:
    """Add the options of `-m gpu`."""
    group = parser.getgroup("gpu", "tests that need a GPU, with -m gpu")
    group.addoption("--limit", type=float, metavar="SECONDS", help="start nothing and end what runs after that time")
    group.addoption("--results", type=Path, default=ROOT / "build" / "gpu" / "results.jsonl", help="file of results")
    group.addoption("--again", action="store_true", help="run tests that were right, too")


class GpuTests:
    """The tests marked `gpu` of one run, over all workers of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._chosen = bool(re.match(r"gpu\b", config.getoption("markexpr", "").strip()))
        self._again, limit = config.getoption("again"), config.getoption("limit")
        self._file, self._key = Path(config.getoption("results")), ""
        given = getattr(config, "workerinput", {})
        self._ends = given.get(_ENDS) or (time.time() + limit if limit and self._chosen else 0.0)
        self._is_worker, self._tests = bool(given), list[str]()
        if self._ends and not config.getoption("numprocesses", None):
            faulthandler.dump_traceback_later(max(self._ends - time.time() + _GRACE, 1.0), exit=True)

    # ---- which tests, in which order --------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        marked = [item for item in items if item.get_closest_marker("gpu")]
        self._tests = [item.nodeid for item in marked]
        # Every worker of pytest-xdist collects all tests; the controller, which prints, collects none.
        if (output := getattr(config, "workeroutput", None)) is not None:
            output["gpu tests"] = self._tests
        left_out = marked if not _gpu() else []
        if marked and self._chosen and _gpu():
            before = self._results()
            left_out = [item for item in marked if before.get(item.nodeid) == RIGHT and not self._again]
            # One that was tried and was not right must not take the time of another that was never tried.
            items.sort(key=lambda item: (item.nodeid in before, _rank(item)))
        if left_out:
            items[:] = [item for item in items if item not in left_out]
            config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_ENDS] = self._ends

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._tests = self._tests or getattr(node, "workeroutput", {}).get("gpu tests", [])

    # ---- the limit --------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        with self._within_limit():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with self._within_limit():
            return (yield)

    @contextlib.contextmanager
    def _within_limit(self) -> Iterator[None]:
        """Skip what would begin after the limit, and what has not ended by then."""

        def over(*_: object) -> None:
            pytest.skip("the time of --limit was over")

        if not self._ends:
            yield
            return
        if time.time() > self._ends:
            over()
        before, thread = signal.signal(signal.SIGUSR2, over), threading.get_ident()
        timer = threading.Timer(self._ends - time.time(), signal.pthread_kill, (thread, signal.SIGUSR2))
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            # What comes late would end the process by default.
            signal.signal(signal.SIGUSR2, signal.SIG_IGN if before is signal.SIG_DFL else before)

    # ---- results ----------------------------------------------------------------------------------

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != RIGHT:
            crash = getattr(report.longrepr, "reprcrash", None)  # a long traceback may end with something else
            first = f"{crash.message[:1000]}\n" if crash else ""
            why = "" if report.passed else first + str(report.longrepr)[-4000:]
            outcome = NOT_RUN if report.skipped else report.outcome
            self._note(
                report.nodeid,
                outcome=outcome,
                seconds=round(report.duration, 1),
                why=why,
                **dict(report.user_properties),
            )

    def _note(self, nodeid: str, **found: Any) -> None:
        if self._chosen and not self._is_worker and _gpu():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a") as file:  # whole lines, whatever ends the run
                file.write(json.dumps({"test": nodeid, **found, "key": self._key_here()}) + "\n")

    def _results(self) -> dict[str, str]:
        """Return how each test ended last, for these sources on this machine."""
        found = {}
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            with contextlib.suppress(ValueError):  # a line that was cut off
                if (result := json.loads(line))["key"] == self._key_here():
                    found[result["test"]] = result["outcome"]
        return found

    def _key_here(self) -> str:
        self._key = self._key or key()
        return self._key

    # ---- the verdict ------------------------------------------------------------------------------

    def _counts(self) -> dict[str, int]:
        found = self._results()
        outcomes = [found.get(test, NOT_RUN) for test in self._tests]
        counts = {kind: outcomes.count(kind) for kind in (RIGHT, WRONG)}
        return {**counts, NOT_RUN: len(outcomes) - sum(counts.values())}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._tests and self._chosen and not self._is_worker and _gpu() and session.exitstatus in (0, 5):
            counts = self._counts()
            session.exitstatus = 1 if counts[WRONG] else INCOMPLETE if counts[NOT_RUN] else 0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._tests and not _gpu():
            number = len(self._tests)
            terminalreporter.write_line(f"{number} tests that need a GPU were left out: torch sees no CUDA device")
        elif self._tests and self._chosen:
            counts = ", ".join(f"{number} {kind}" for kind, number in self._counts().items())
            terminalreporter.write_line(f"{_gpu()}: of {len(self._tests)} tests {counts}; see {self._file}")

    def pytest_unconfigure(self) -> None:
        if self._ends:
            faulthandler.cancel_dump_traceback_later()


def _gpu() -> str:
    """Return the name of the GPU; nothing without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _rank(item: pytest.Item) -> int:
    return next((at for at, name in enumerate(ORDER) if item.nodeid.startswith(f"tests/{name}")), len(ORDER))


def key(root: Path = ROOT) -> str:
    """Return a digest of the sources, the GPU and torch's version: a result holds for these."""
    import torch

    digest = hashlib.sha256(f"{_gpu()} {torch.__version__}".encode())
    for name in SOURCES:
        for path in sorted([root / name, *(root / name).rglob("*")]):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".pyc", ".o"):
                digest.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
