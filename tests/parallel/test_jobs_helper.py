"""The helper that starts jobs: reports arrive, failures are seen, nothing survives."""

from __future__ import annotations

import time

import psutil
import pytest

from tests.support.jobs import RunningJob, run_ranks


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
