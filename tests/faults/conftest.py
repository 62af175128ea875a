"""One nursery for all fault tests of a run, and the table of their stopwatches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("horovod.torch")

from tests.faults import JOBS
from tests.support.nursery import Nursery

from .survivors import TABLE


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery(JOBS)
    yield made
    made.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if TABLE and terminalreporter.verbosity > 0:
        terminalreporter.section("seconds from a fault to the error on the first and the last survivor")
        for watch in TABLE:
            terminalreporter.write_line(str(watch))
