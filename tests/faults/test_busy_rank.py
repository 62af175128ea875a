"""A rank that is busy keeps the others waiting for longer than one that is frozen: it answers when it is asked."""

from __future__ import annotations

import pytest

from tests.support.marks import slow
from tests.support.nursery import Nursery, Rank

from .survivors import DDP, WORLD, blames, check_survivors, strike

FLOW = 1.2
LIMITS = {"timeout": None, "limits": [FLOW, 60.0]}
VICTIM = 0


def late(nursery: Nursery, path: str, limits: list[float], seconds: float) -> list[Rank]:
    case = {"fault": "sleep", "victim": VICTIM, "path": path, "timeout": None, "limits": limits, "sleep": seconds}
    return nursery.run(WORLD, "train.py", case | {"leave": True})


@pytest.mark.parametrize("path", [*slow("stock", "attached"), DDP])
def test_busy(nursery: Nursery, path: str) -> None:
    """For twice as long as a frozen rank may be, and the others say so."""
    ranks = late(nursery, path, [FLOW, 60.0], 2 * FLOW + 0.5)
    for rank in ranks:
        assert (rank.report["first"]["error"], rank.report["steps"]) == (None, 4), rank
    said = [rank.number for rank in ranks if "has been waiting since" in rank.output]
    assert said == [1], "the first of those that wait"
    assert "for rank(s) 0, before bucket " in ranks[1].output and "alive, but out of batches, or" in ranks[1].output


@pytest.mark.slow
@pytest.mark.parametrize("path", ["attached", "stock", DDP])
def test_busy_for_too_long(nursery: Nursery, path: str) -> None:
    for rank in late(nursery, path, [0.6, 1.8], 4.0):
        first = rank.report["first"]
        assert "HorovodInternalError" in first["kinds"], first
        if rank.number != VICTIM and path != "stock":
            assert first["seconds"] < 4.0 and blames(first["text"], VICTIM), first
            assert "rank(s) 0 kept the others waiting" in first["text"] or "gone" in first["text"], first


@pytest.mark.slow
@pytest.mark.parametrize("path", ["attached", DDP])
@pytest.mark.parametrize("phase", ["idle", "mid-ring"])
def test_frozen(nursery: Nursery, phase: str, path: str) -> None:
    """As soon as with one limit."""
    survivors = strike(nursery, "stop", phase, 2, path, **LIMITS)
    check_survivors(survivors, 2, path, FLOW - 1.0, FLOW + 2.5)
