"""Clipping between the exchange and the optimizer's step, in real processes under both fronts."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import checks_of

#: The ratio is measured within 4 %, in the first steps by each for itself.
CLOSE = 0.25
FRONTS = ("horovod", "torch")


#: For `make test-all`: what both fronts share has a sibling under one of them, and every method its kind.
LATER = {
    "horovod": ("norms topk", "without clipping SGD"),
    "torch": (
        "norms marsit",
        "norms signsgd",
        "norms topk",
        "without clipping AdamW",
        "without clipping SGD",
        "lower rate",
        "resumed",
        "warned",
    ),
}
VALUES = {front: checks_of("clipping.py", LATER[front], timeout=280.0, front=front) for front in FRONTS}


def each(*names: str) -> pytest.MarkDecorator:
    """Run a test for these checks under each front."""
    cases = [(front, name) for front in FRONTS for name in names]
    marked = [pytest.param(*case, marks=[pytest.mark.slow] * (case[1] in LATER[case[0]])) for case in cases]
    return pytest.mark.parametrize(("front", "name"), marked)


@each("norms marsit", "norms signsgd", "norms topk")
def test_clipping_sees_the_norm_of_the_exact_mean(front: str, name: str) -> None:
    cases = VALUES[front](name)
    assert all(case["matched"]["norms"] == cases[0]["matched"]["norms"] for case in cases), "on every rank"
    assert all(case["matched"]["weights"] == cases[0]["matched"]["weights"] for case in cases)
    assert abs(cases[0]["matched"]["off"]) < CLOSE
    assert cases[0]["matched"]["gradient norm"] > 0
    assert cases[0]["as made"]["ratio"] == 1.0
    if name == "norms marsit":  # whose results are far from it
        assert abs(cases[0]["as made"]["off"]) > 2 * CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("method", ["marsit", "signsgd", "topk"])
def test_both_fronts_give_the_same_bits(method: str) -> None:
    ours, theirs = (VALUES[front](f"norms {method}")[0] for front in FRONTS)
    assert ours == theirs


@each("without clipping AdamW", "without clipping SGD")
def test_without_clipping_nothing_changes(front: str, name: str) -> None:
    for apart, moved in VALUES[front](name):
        assert apart < 0.02 * moved, "rounding, which signs make larger"


@each("spike topk AdamW", "spike marsit SGD")
def test_what_a_spike_leaves_is_clipped_with_it(front: str, name: str) -> None:
    for clipped, whole, skipped in VALUES[front](name):
        assert 0.3 < clipped < 3.0
        assert 0.3 < skipped < 3.0, "and dropped"
        assert whole > 30.0, "the control: nothing clips it"


@each("lower rate")
def test_residuals_that_follow_a_lower_rate_are_no_spike(front: str, name: str) -> None:
    for expected, unexpected in VALUES[front](name):
        assert not expected
        assert unexpected, "the control"


@each("resumed")
def test_resume_is_exact(front: str, name: str) -> None:
    assert all(found == [True, False] for found in VALUES[front](name))


@each("warned")
def test_who_adds_is_told_once(front: str, name: str) -> None:
    first, *others = VALUES[front](name)
    assert first == {"added": 1, "by value": 0, "by unit": 0, "multiplied": 0}
    assert all(not any(found.values()) for found in others)


def test_results_on_top_of_results_are_not_scaled() -> None:
    for number, case in enumerate(VALUES["torch"]("on top")):
        assert case["off"] and case["ratio"] == 1.0 and case["said"] == (number == 0)


def test_a_closure_is_a_step_like_any_other() -> None:
    for with_closures, without in VALUES["torch"]("closures"):
        assert with_closures == without


@each("refused")
def test_other_values_are_refused(front: str, name: str) -> None:
    assert all("match_norm should be True or False, got 'yes'" in found for found in VALUES[front](name))
