"""Adaptive schedules under stock Horovod, in real processes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks

pytestmark = pytest.mark.slow

CASES = [f"{name} {schedule} {attach}" for name in ("net", "odd") for schedule in ("auto", "layerfusion", "mergecomp")
         for attach in (False, True)] + ["layers auto True", "tables auto True"]  # fmt: skip


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, "tuning.py", timeout=240, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}).values()


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_same_bits_and_buckets_after_every_step(found, case: str) -> None:
    for report in found:
        for ranks in report[case]["steps"]:
            assert len(ranks) == len(found) and len({tuple(one) for one in ranks}) == 1
        assert report[case]["verified"] == len(report[case]["steps"])


@pytest.mark.parametrize("case", CASES)
def test_buckets_are_tried_and_then_chosen(found, case: str) -> None:
    for report in found:
        assert report[case]["chosen"] and report[case]["plans"] > 1
        last = [ranks[0][1] for ranks in report[case]["steps"][-5:]]
        assert len(set(last)) == 1


def test_a_checkpoint_goes_on_with_the_chosen_buckets(found) -> None:
    for case in ("resumed", "resumed with tables"):
        assert [report[case] for report in found] == [[True, True, True]] * len(found)


def test_ranks_that_made_other_compressions_before_meet_all_the_same(found) -> None:
    assert [report["beside a process set"] for report in found] == [1] * len(found)


def test_update_mode_is_refused(found) -> None:
    assert all("fixed schedule" in report["update mode"] for report in found)
