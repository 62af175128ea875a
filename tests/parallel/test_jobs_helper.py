"""The helper that starts jobs: reports arrive, failures are seen, nothing survives."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.support.jobs import RunningJob, run_ranks
from tests.support.marks import slow
from tests.support.yields import sleeping_yields


@pytest.mark.parametrize("launched", [*slow(True), False])
def test_every_rank_reports_and_gets_the_arguments(launched: bool) -> None:
    job = run_ranks(2, "hello.py", arguments={"x": [1, 2]}, launched=launched)
    assert [report["rank"] for report in job.reports] == [0, 1]
    assert all(report["given"] == {"x": [1, 2]} and report["size"] == 2 for report in job.reports)
    assert job.pids == {report["rank"]: report["pid"] for report in job.reports}
    assert job.output.count("taken apart") == 2, "what a rank has made ends with it, though it was forked"


@pytest.mark.slow
def test_a_rank_that_fails_is_seen() -> None:
    with pytest.raises(AssertionError, match="status"):
        run_ranks(2, "hello.py", arguments={"status": 3})


@pytest.mark.slow
@pytest.mark.alone
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
@pytest.mark.alone
@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_busy_waits_sleep_where_ranks_leave_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setenv("LD_PRELOAD", "")
    assert sleeping_yields(2) == {}
    for wait in (YIELDING, ASKING):
        assert switches(wait, sleeping_yields(3)) >= 90 > 10 >= switches(wait, {})
    assert switches(LISTENING, sleeping_yields(3)) <= 10, "events that differ are not waited for"
    assert all(report["sleeping yields"] for report in run_ranks(3, "hello.py", launched=True).reports)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert not any(report["sleeping yields"] for report in run_ranks(3, "hello.py", launched=True).reports)


YIELDING = "os.sched_yield()"
# A pipe that holds a byte is ready whenever somebody asks; of two such, each answer names both.
PREPARED = """
import os, resource, select
used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
asked, both, pipes = select.epoll(), select.epoll(), [os.pipe() for _ in range(2)]
for out, into in pipes:
    os.write(into, b"x")
    both.register(out, select.EPOLLIN)
asked.register(pipes[0][0], select.EPOLLIN)
"""
ASKING, LISTENING = "asked.poll(0)", "both.poll(0)"


def switches(wait: str, environment: dict[str, str]) -> int:
    """Return how often a process that waits a hundred times goes to sleep."""
    text = f"{PREPARED}before = used()\n[{wait} for _ in range(100)]\nprint(used() - before)"
    run = subprocess.run([sys.executable, "-c", text], env=os.environ | environment, capture_output=True, check=True)
    return int(run.stdout)
