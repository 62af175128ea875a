"""Where ranks meet through Horovod's gathers, a failure is told to all at once, and with the reason that it has."""

from __future__ import annotations

import pytest

from tests.support.marks import slow
from tests.support.nursery import Nursery

WORLD = 3
TIMEOUT, SLEEP = 20.0, 1.0
#: Well below the time limit, for a machine that is busy: what is told at once takes a second.
SOON = 14.0


def _case(**more: object) -> dict[str, object]:
    return {"fault": None, "victims": [1], "sleep": SLEEP, "timeout": TIMEOUT} | more


def test_control(nursery: Nursery) -> None:
    for rank in nursery.run(WORLD, "gathers.py", _case(), bound=90.0):
        assert rank.report, rank.output
        for what in ("start", "save", "load", "train"):
            assert rank.report[what]["error"] is None, rank.report
        assert (rank.report["threads"], rank.report["ports"]) == (0, 0), rank.report


@pytest.mark.parametrize("pair", [[0, 1], *slow([1, 2], [0, 2])], ids=str)
def test_a_pair_that_cannot_connect_is_named_by_all(nursery: Nursery, pair: list[int]) -> None:
    """The others are connected, and wait for their next addresses: they do not take these ranks for a new start."""
    case = _case(fault="connect", victims=pair)
    for rank in nursery.run(WORLD, "gathers.py", case, bound=90.0):
        assert rank.report, rank.output
        start = rank.report["start"]
        assert start["error"] == "ExchangeError" and start["seconds"] < SOON, rank.report
        for other in pair:
            assert f"rank {other}: not all of {WORLD} ranks connected" in start["text"], rank.report
        assert (rank.report["threads"], rank.report["ports"]) == (0, 0), rank.report


@pytest.mark.parametrize("what", ["save", *slow("load", "train")])
def test_nobody_waits_for_a_rank_that_has_failed(nursery: Nursery, what: str) -> None:
    """It never comes to the gather; the others have heard of its error."""
    case = _case(fault=what, sleep=SOON)
    for rank in nursery.run(WORLD, "gathers.py", case, bound=90.0):
        if rank.number == 1:
            continue
        assert rank.report, rank.output
        call = rank.report["call"]
        assert call["error"] == "ExchangeError" and call["seconds"] < SOON, rank.report
        assert "Rank 1 stopped first" in call["text"] and "this rank's own error" in call["text"], rank.report


@pytest.mark.slow
def test_a_start_that_fails_at_its_end_leaves_no_connection(nursery: Nursery) -> None:
    """The rank that has no room for its buffers lets go of its connections; the others see that at their next step."""
    ranks = nursery.run(WORLD, "gathers.py", _case(fault="reducer"), bound=90.0)
    for rank in ranks:
        assert rank.report, rank.output
        assert rank.report["start"]["error"] == ("MemoryError" if rank.number == 1 else None), rank.report
        assert (rank.report["threads"], rank.report["ports"]) == (0, 0), rank.report
