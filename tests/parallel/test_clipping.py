"""Clipping between the exchange and the optimizer's step, in real processes under both fronts."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks

#: The ratio is held for five steps, and measured within 4 %.
CLOSE = 0.25
FRONTS = ("horovod", "torch")


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    return {front: run_ranks(2, "clipping.py", timeout=280.0, front=front).values() for front in FRONTS}


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("method", ["marsit", "signsgd", "topk"])
def test_clipping_sees_the_norm_of_the_exact_mean(found, front: str, method: str) -> None:
    cases = [report[f"norms {method}"] for report in found[front]]
    assert all(case["matched"]["norms"] == cases[0]["matched"]["norms"] for case in cases), "on every rank"
    assert all(case["matched"]["weights"] == cases[0]["matched"]["weights"] for case in cases)
    assert abs(cases[0]["matched"]["off"]) < CLOSE
    assert cases[0]["matched"]["gradient norm"] > 0
    assert cases[0]["as made"]["ratio"] == 1.0
    if method == "marsit":  # whose results are far from it
        assert abs(cases[0]["as made"]["off"]) > 2 * CLOSE


def test_both_fronts_give_the_same_bits(found) -> None:
    for method in ("marsit", "signsgd", "topk"):
        ours, theirs = (found[front][0][f"norms {method}"] for front in FRONTS)
        assert ours == theirs


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_without_clipping_nothing_changes(found, front: str, optimizer: str) -> None:
    for report in found[front]:
        apart, moved = report[f"without clipping {optimizer}"]
        assert apart < 0.02 * moved, "rounding, which signs make larger"


@pytest.mark.parametrize("front", FRONTS)
def test_resume_is_exact(found, front: str) -> None:
    assert all(report["resumed"] == [True, False] for report in found[front])


@pytest.mark.parametrize("front", FRONTS)
def test_who_adds_is_told_once(found, front: str) -> None:
    first, *others = found[front]
    assert first["warned"] == {"added": 1, "by value": 0, "by unit": 0, "multiplied": 0}
    assert all(not any(report["warned"].values()) for report in others)


def test_results_on_top_of_results_are_not_scaled(found) -> None:
    for number, report in enumerate(found["torch"]):
        case = report["on top"]
        assert case["off"] and case["ratio"] == 1.0 and case["said"] == (number == 0)


def test_a_closure_is_a_step_like_any_other(found) -> None:
    for report in found["torch"]:
        with_closures, without = report["closures"]
        assert with_closures == without


@pytest.mark.parametrize("front", FRONTS)
def test_other_values_are_refused(found, front: str) -> None:
    assert all("match_norm should be True or False, got 'yes'" in report["refused"] for report in found[front])
