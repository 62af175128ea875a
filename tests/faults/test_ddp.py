"""DistributedDataParallel, or a plain module, with a rank that dies, freezes or stops: all end, and in time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.jobs import Job, RunningJob, run_ranks

SCRIPT = Path(__file__).parent / "jobs" / "ddp.py"
WORLD, VICTIM, TIMEOUT = 3, 1, 4.0
MOST_SECONDS = 30.0  # from a fault to the end of the others, on a machine that is busy
UNUSED = {"find_unused_parameters": True}
PLAIN = {"plain": True}


def survivors(victim: int) -> list[int]:
    return [rank for rank in range(WORLD) if rank != victim]


def harmed(fault: str, ddp: dict[str, Any], victim: int = VICTIM) -> Job:
    def during(job: RunningJob) -> None:
        if fault != "stop":
            return
        pids = [job.pid(rank) for rank in survivors(victim)]
        job.wait_mark("stopped", victim)
        end = time.monotonic() + MOST_SECONDS
        while any(map(running, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not any(map(running, pids)), "a rank that lives has not ended while another is frozen"
        os.kill(job.pid(victim), signal.SIGKILL)

    arguments = {"fault": fault, "victim": victim, "timeout": TIMEOUT, "ddp": ddp}
    return run_ranks(
        WORLD, SCRIPT, timeout=120.0, arguments=arguments, during=during, must_succeed=fault == "none", front="torch"
    )


def running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def check_survivors(job: Job, text: str, victim: int = VICTIM) -> None:
    assert job.status is not None, job.tail()
    for rank in survivors(victim):
        found = job.reports[rank]
        assert found and found["error"] == "ExchangeError" and text in found["text"], (found, job.tail())
        assert found["seconds"] < MOST_SECONDS and found["step"] == 3
    assert len({job.reports[rank]["weights"] for rank in survivors(victim)}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ddp", [{}, UNUSED, PLAIN], ids=["", "unused", "plain"])
def test_without_a_fault_all_end_well(ddp: dict[str, Any]) -> None:
    job = harmed("none", ddp)
    assert [report["error"] for report in job.reports] == [None] * WORLD
    assert len({report["weights"] for report in job.reports}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ddp", [{}, UNUSED, {"static_graph": True}, PLAIN], ids=["", "unused", "static", "plain"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_rank_that_dies_or_freezes_ends_the_others(fault: str, ddp: dict[str, Any]) -> None:
    check_survivors(harmed(fault, ddp), f"No sign of life from rank(s) {VICTIM}")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_so_does_the_rank_whose_process_has_the_store(fault: str) -> None:
    check_survivors(harmed(fault, UNUSED, victim=0), "No sign of life from rank(s) 0", victim=0)


@pytest.mark.slow
@pytest.mark.parametrize("ddp", [{}, PLAIN], ids=["", "plain"])
def test_an_error_of_a_rank_ends_the_others(ddp: dict[str, Any]) -> None:
    job = harmed("raise", ddp)
    check_survivors(job, f"Rank {VICTIM} stopped first")
    assert job.reports[VICTIM]["error"] == "RuntimeError"
