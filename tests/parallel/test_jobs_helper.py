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


def test_every_rank_reports_and_gets_the_arguments() -> None:
    job = run_ranks(2, "hello.py", arguments={"x": [1, 2]})
    assert [report["rank"] for report in job.reports] == [0, 1]
    assert all(report["given"] == {"x": [1, 2]} and report["size"] == 2 for report in job.reports)
    assert job.pids == {report["rank"]: report["pid"] for report in job.reports}


def test_a_rank_that_fails_is_seen() -> None:
    with pytest.raises(AssertionError, match="status"):
        run_ranks(2, "hello.py", arguments={"status": 3})


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


def test_yields_sleep_where_ranks_outnumber_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setenv("LD_PRELOAD", "")
    assert sleeping_yields(3) == {}
    text = "import os, time; b = time.monotonic(); [os.sched_yield() for _ in range(100)]; print(time.monotonic() - b)"
    run = [sys.executable, "-c", text]
    took = float(subprocess.run(run, env=os.environ | sleeping_yields(4), capture_output=True, check=True).stdout)
    control = min(float(subprocess.run(run, capture_output=True, check=True).stdout) for _ in range(3))
    assert control < 0.01 <= took
