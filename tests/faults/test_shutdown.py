"""The end of a process, in whatever state: interrupted, asked to end, or a fork of a rank."""

from __future__ import annotations

import signal

import pytest

from tests.support.marks import slow
from tests.support.nursery import Nursery

WORLD = 3


@pytest.mark.parametrize("path", slow("stock", "attached", "update", "ddp"))
def test_a_fork_leaves_the_job_alone(nursery: Nursery, path: str) -> None:
    """Children of a rank, such as those of a data loader, may end, close and try; the rank goes on."""
    ranks = nursery.run(WORLD, "train.py", {"fault": "fork", "victim": 1, "catch": False, "path": path})
    assert ranks[1].marks.get("child") == "0", ranks[1]
    for rank in ranks:
        assert (rank.status, rank.output) == (0, "") and "done" in rank.marks, rank


@pytest.mark.slow
@pytest.mark.parametrize("event", ["idle", "hop"])
@pytest.mark.parametrize("path", ["stock", "attached", "update", "ddp"])
def test_an_interrupted_rank_ends(nursery: Nursery, path: str, event: str) -> None:
    """Ctrl-C, in an exchange and between steps; the others end too, as one of them is gone."""
    case = {"fault": "interrupt", "victim": 1, "event": event, "hop": 0 if event == "hop" else -1}
    more = {"catch": False, "path": path, "sleeper": 2, "sleep": 3.0, "timeout": 20.0, "steps": 2000}
    ranks = nursery.run(WORLD, "train.py", case | more, bound=60.0)
    assert "KeyboardInterrupt" in ranks[1].output and ranks[1].status in (1, 130, -signal.SIGINT), ranks[1]
    for rank in ranks:
        assert rank.status not in (0, None), rank
        assert "Fatal Python error" not in rank.output and "terminate called" not in rank.output
