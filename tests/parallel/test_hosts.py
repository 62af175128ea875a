"""Ranks that share hosts, as processes: equal weights, memory that leaves nothing behind, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import needs_front, run_ranks
from tests.support.marks import slow

WORLD = 4
FEW = ["none", "flat none", "marsit adam", "each"]
MORE = ["mixed", "one", "stock", "update", "powersgd", "topk", "tuned"]
REFUSED = ["uneven", "masked"]
EMPTIED = ["emptied", "emptied without hosts", "emptied later"]
RESUMED = ["resumed powersgd", "resumed loco", "resumed sketch_fusion", "resumed marsit"]


def trained(front: str, cases: list[str]) -> list[dict[str, Any]]:
    needs_front(front)
    return run_ranks(WORLD, "hosts.py", timeout=200, arguments={"front": front, "cases": cases}, front=front).values()


@pytest.fixture(scope="module", params=["horovod", *slow("torch")])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found = trained(request.param, [*FEW, *REFUSED])
    check_learned(found, FEW)
    return found


def check_learned(ranks: list[dict[str, Any]], names: list[str]) -> None:
    for name in names:
        assert len({rank[name]["digest"] for rank in ranks}) == 1, name
        for rank in ranks:
            assert rank[name]["losses"][-1] < rank[name]["losses"][0], name
            assert rank[name]["verified"] > 0 and rank[name]["maps"] == 0, name


def check_resumed(ranks: list[dict[str, Any]], names: list[str]) -> None:
    for name in names:
        for way in ("saved", "loaded", "elsewhere", "reset", "fresh"):
            assert len({rank[name][way][0] for rank in ranks}) == 1, (name, way)
        for found in (rank[name] for rank in ranks):
            assert found["saved"] == found["loaded"], name
            assert found["fresh"][0] != found["saved"][0] and not found["fresh"][1] + found["reset"][1], name
            assert "the same ranks on each host" in found["elsewhere"][1], name


@pytest.mark.slow
@pytest.mark.parametrize(("front", "names"), [("horovod", RESUMED), ("torch", RESUMED[:1])])
def test_a_job_goes_on_with_the_same_bits_where_hosts_have_the_same_ranks(front: str, names: list[str]) -> None:
    """A quick test of the same, in one process, is in unit/test_shares.py."""
    check_resumed(trained(front, names), names)


@pytest.mark.slow
def test_weights_are_equal_and_losses_fall_whatever_the_method_and_the_hosts() -> None:
    check_learned(trained("horovod", MORE), MORE)


def test_plain_numbers_learn_what_they_learn_without_hosts(found) -> None:
    for rank in found:
        assert rank["none"]["losses"] == pytest.approx(rank["flat none"]["losses"], rel=1e-4)


def test_a_rank_sends_its_share_only_and_keeps_a_residual_for_it(found) -> None:
    sent, flat = (sum(rank[name]["bytes"] for rank in found) for name in ("none", "flat none"))
    assert sent < 0.6 * flat
    whole = found[0]["each"]["kept"]
    assert sum(rank["marsit adam"]["kept"] for rank in found) == 2 * whole  # once for each host


def test_states_say_which_share_of_which_host(found) -> None:
    assert sorted(rank["marsit adam"]["hosts"] for rank in found) == [[2, 0, 0], [2, 0, 1], [2, 1, 0], [2, 1, 1]]
    assert [rank["each"]["hosts"] for rank in found] == [None] * WORLD  # no rank shares its host


def test_what_cannot_be_done_is_refused_on_every_rank(found) -> None:
    for rank in found:
        assert "[0, 1, 2], [3]" in rank["uneven"]
        assert "masked()" in rank["masked"]
