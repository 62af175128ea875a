"""A start that fails ends in time, on every rank, and the next one can succeed; nobody is let in who was not asked."""

from __future__ import annotations

import pytest

from tests.faults import JOBS
from tests.support.jobs import run_ranks
from tests.support.nursery import Nursery

TIMEOUT = 3.0
#: Some seconds beside the limits, for a machine that is busy.
SLACK = 6.0
ATTACKS = ("silence", "many", "garbage", "half a handshake", "a handshake", "http")


def _case(**more: object) -> dict[str, object]:
    return {"victim": 0, "fault": None, "sleep": 0.0, "timeout": TIMEOUT, "tries": 2} | more


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_stops_before_it_connects(nursery: Nursery, victim: int) -> None:
    """The others are told in time, twice, and by an error of ours."""
    case = _case(fault="stop", victim=victim)
    for rank in nursery.run(3, "start.py", case, victims=[victim], bound=60.0):
        if rank.number != victim:
            first, second = rank.report["errors"]
            assert first[0] == second[0] == "ExchangeError", rank.report
            assert first[1] < TIMEOUT + SLACK and second[1] < 2 * (TIMEOUT + SLACK), rank.report


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_after_a_start_that_failed_the_next_one_can_succeed(nursery: Nursery, victim: int) -> None:
    case = _case(fault="sleep", sleep=2 * TIMEOUT, victim=victim, tries=12)
    ranks = nursery.run(2, "start.py", case, bound=100.0)
    assert all(rank.report and rank.report["weights"] for rank in ranks), ranks
    assert len({rank.report["weights"] for rank in ranks}) == 1
    for rank in ranks:
        assert {kind for kind, *_ in rank.report["errors"]} <= {"ExchangeError"}, rank.report
        assert rank.report["errors"] or rank.number == victim


@pytest.mark.slow
def test_control(nursery: Nursery) -> None:
    ranks = nursery.run(3, "start.py", _case())
    assert [rank.report["errors"] for rank in ranks] == [[]] * 3
    assert len({rank.report["weights"] for rank in ranks}) == 1


@pytest.mark.slow
def test_a_stray_client_changes_nothing() -> None:
    """At every port, on the job's interface only. Nobody gets in while it trains, and no port is left."""
    case = {"attacks": ATTACKS, "connections": 50}
    found = run_ranks(2, JOBS / "stray.py", timeout=250, arguments=case).values()
    for report in found:
        assert report["calm"]["weights"] == found[0]["calm"]["weights"]
        for name in ATTACKS:
            assert report[name]["weights"] == report["calm"]["weights"], name
            assert report[name]["met"], "there was no port to knock at"
            assert all(host == "127.0.0.1" for host, _ in report[name]["met"]), report[name]["met"]
            assert not report[name]["late"], report[name]["late"]
            assert not report[name]["left"], report[name]["left"]
