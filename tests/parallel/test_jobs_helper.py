"""The helper that starts jobs: reports arrive, failures are seen, nothing survives."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.jobs import RunningJob, run_ranks
from tests.support.yields import sleeping_yields

pytestmark = pytest.mark.alone


def test_every_rank_reports_and_gets_the_arguments() -> None:
    job = run_ranks(2, "hello.py", arguments={"x": [1, 2]}, launched=True)
    assert [report["rank"] for report in job.reports] == [0, 1]
    assert all(report["given"] == {"x": [1, 2]} and report["size"] == 2 for report in job.reports)
    assert job.pids == {report["rank"]: report["pid"] for report in job.reports}


@pytest.mark.slow
def test_a_rank_that_fails_is_seen() -> None:
    with pytest.raises(AssertionError, match="status"):
        run_ranks(2, "hello.py", arguments={"status": 3})


@pytest.mark.slow
def test_a_job_that_hangs_is_ended_with_all_its_processes() -> None:
    seen: list[psutil.Process] = []

    def watch(job: RunningJob) -> None:
        for rank in range(job.world):
            job.wait_mark("started", rank)
        seen.extend(psutil.Process(job.pid(rank)) for rank in range(job.world))

    began = time.monotonic()
    job = run_ranks(2, "hello.py", arguments={"hang": True}, timeout=15, during=watch, must_succeed=False)
    assert job.status is None and job.reports == [None, None]
    assert time.monotonic() - began < 30
    assert len(seen) == 2 and not any(p.is_running() and p.status() != "zombie" for p in seen)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_yields_sleep_where_ranks_leave_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setenv("LD_PRELOAD", "")
    assert sleeping_yields(2) == {}
    assert switches(sleeping_yields(3)) >= 100 > switches({})
    assert all(report["sleeping yields"] for report in run_ranks(3, "hello.py").reports)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert not any(report["sleeping yields"] for report in run_ranks(3, "hello.py").reports)


def switches(environment: dict[str, str]) -> int:
    """Return how often a process that yields a hundred times goes to sleep."""
    usage = "resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw"
    text = f"import os, resource; b = {usage}; [os.sched_yield() for _ in range(100)]; print({usage} - b)"
    run = subprocess.run([sys.executable, "-c", text], env=os.environ | environment, capture_output=True, check=True)
    return int(run.stdout)
