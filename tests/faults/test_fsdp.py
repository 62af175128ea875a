"""A divided model whose rank comes to harm: the others say who, by replica and by number in the job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.nursery import Nursery, Rank

WORLD, VICTIM, MATE = 4, 3, 1  # two replicas of two shards: ranks 1 and 3 have shard 1
#: Waits for a frozen rank in torch's own collective, as long as its group says, unless a launcher ends it.
ROW_MATE = 2
BOUND = 60.0
WORDS = (
    "Numbers of ranks are those of the replicas of shard 1 here; in the job, replica 0 is rank 1, replica 1 is rank 3."
)


def run(nursery: Nursery, fault: str, **more: Any) -> list[Rank]:
    gone = {"kill": [VICTIM], "stop": [VICTIM, ROW_MATE]}.get(fault, [])
    case = {"path": "fsdp", "shards": 2, "victim": VICTIM, "fault": fault, "timeout": 2.0, "torch_timeout": 12.0}
    return nursery.run(WORLD, "train.py", case | more, victims=gone, bound=BOUND)


@pytest.mark.slow
def test_a_job_without_a_fault_ends_well(nursery: Nursery) -> None:
    for rank in run(nursery, "none"):
        assert rank.report["first"]["error"] is None and rank.report["steps"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_rank_that_is_gone_is_named(fault: str, nursery: Nursery) -> None:
    ranks = run(nursery, fault, event="hop", hop=0)
    told = ranks[MATE].report["first"]
    assert told["error"] == "ExchangeError", told
    assert told["text"].endswith(WORDS) and "No sign of life from rank(s) 1: look" in told["text"], told["text"]
    for rank in ranks:  # those of the other shard hear of it by torch's collectives, or by ranks that have stopped
        waits = rank.number == VICTIM or (fault, rank.number) == ("stop", ROW_MATE)
        assert waits or rank.report["first"]["error"], rank


@pytest.mark.slow
def test_a_rank_that_is_late_is_waited_for(nursery: Nursery) -> None:
    for rank in run(nursery, "sleep", sleep=3.0, timeout=None):
        assert rank.report["first"]["error"] is None and rank.report["steps"] == 4


@pytest.mark.slow
def test_a_rank_s_own_error_ends_all(nursery: Nursery) -> None:
    ranks = run(nursery, "raise")
    assert "this rank's own error" in ranks[VICTIM].report["first"]["text"]
    assert all(rank.report["first"]["error"] for rank in ranks)


@pytest.mark.slow
def test_a_rank_of_another_shard_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    job = Path(__file__).parent / "jobs" / "row.py"
    ranks = [
        subprocess.Popen([sys.executable, str(job), str(rank), f"{tmp_path}/store"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        told, _ = ranks[0].communicate(timeout=BOUND)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert "expected to hear within 1 s from rank(s) 1, which have the other shards of this replica" in told, told
    assert float(told.partition(" s: ")[0]) < 8.0, told  # it was to wait for 1, and the other sleeps for 10
