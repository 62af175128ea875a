"""Exact first steps are the same steps after a load, whether a run goes back into them or is resumed inside them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks

pytestmark = pytest.mark.slow

FIRST, INSIDE, END = 30, 12, 70
FULL = 50  # the method's own, after which nothing waits
EXACT = [step < FIRST or step == FULL for step in range(END)]
PATHS = pytest.mark.parametrize("path", [False, True], ids=["stock", "attached"])


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, "exact.py", timeout=280, arguments={"inside": INSIDE, "end": END}).reports


@PATHS
def test_the_run_goes_on_with_the_same_bits(found, path: bool) -> None:
    for report in found:
        case = report[f"fixed {path}"]
        assert case["again"] == case["resumed"] == case["whole"] != case["compressed"]
        assert case["whole"] == found[0][f"fixed {path}"]["whole"]


@PATHS
def test_as_many_steps_are_exact(found, path: bool) -> None:
    for report in found:
        case = report[f"fixed {path}"]
        assert case["exact"] == EXACT
        assert case["again exact"] == case["resumed exact"] == case["exact"][INSIDE:]


@PATHS
@pytest.mark.parametrize("way", ["again", "resumed"])
def test_a_search_begins_with_the_first_step_that_is_compressed(found, path: bool, way: str) -> None:
    for report in found:
        case = report[f"searched {path}"]
        assert case["first"] == FIRST
        assert case[way]["exact"] == EXACT[INSIDE:]
        assert case[way]["waits"] and case[way]["done"]
        assert len(set(case[way]["ranks"])) == 1
