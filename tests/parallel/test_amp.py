"""Gradient scalers change the scale of what waits too; compiled models are trained as others are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks

pytestmark = pytest.mark.slow

METHODS = ("marsit", "topk", "onebit_adam", "sketch_fusion")


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, "amp.py", timeout=240).values()


@pytest.mark.parametrize("method", METHODS)
def test_a_scale_that_is_followed_leaves_no_trace(found: list[dict[str, Any]], method: str) -> None:
    """Powers of two change no bit of a mantissa, so the weights are those of a run without a scaler."""
    for report in found:
        case = report[f"scaler {method}"]
        assert case["followed"] == case["plain"]
        assert case["resumed"] == [case["plain"]] * 3
        assert len(set(case["plain"])) == len(case["plain"])
        assert case["left"] != case["plain"]  # the control: what waits does matter


@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_is_skipped_is_skipped_on_every_rank(found: list[dict[str, Any]], method: str) -> None:
    first, second = (report[f"scaler {method}"]["skipped"] for report in found)
    assert first == second and first[3] == first[2] and len(set(first)) == len(first) - 1


def test_one_scaler_once(found: list[dict[str, Any]]) -> None:
    assert all(
        "once" in report["refusals"][0] and "updates are not scaled" in report["refusals"][1] for report in found
    )


@pytest.mark.parametrize("method", ["marsit", "topk"])
def test_compiled_models_give_the_same_bits_on_every_rank_and_path(found: list[dict[str, Any]], method: str) -> None:
    for report in found:
        case = report[f"compiled {method}"]
        assert case["stock"] == case["attached"] == found[0][f"compiled {method}"]["attached"]
        assert len(set(case["stock"])) == len(case["stock"])
