"""A held second moment beside accumulation, scalers, process sets, frozen layers and the like, in real processes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from horovod_compress.engine.optimizer.second_moment import BOUND
from tests.support.jobs import run_ranks

pytestmark = pytest.mark.slow
#: Exact rounds are 0 to 3, and then 4, 9 and 14.
PLAIN = ["plain", "two passes", "per layer", "by step", "fused", "maximize", "layerwise", "onebit_adam"]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(3, "held_corners.py", timeout=240).values()


@pytest.mark.parametrize("case", [*PLAIN, "overflow in an exact step", "overflow elsewhere", "thawed", "to and fro"])
def test_ranks_agree_and_weights_are_finite(found, case: str) -> None:
    assert all(report[case]["ranks"] == 1 and report[case]["finite"] for report in found)


@pytest.mark.parametrize("case", PLAIN)
def test_every_tensor_s_is_held(found, case: str) -> None:
    assert all(report[case]["held"] == 6 for report in found)


@pytest.mark.parametrize("case", ["two passes", "sum", "layerwise"])
def test_both_paths_give_the_same_bits(found, case: str) -> None:
    for report in found:
        attached, stock = report[f"both paths, {case}"]
        assert attached == stock


def test_in_a_process_set_and_for_sums(found) -> None:
    for report in found:
        first, nothing, third = report["process set"]["digests"]
        assert first == third and nothing == [] and first[0] == first[1]


@pytest.mark.parametrize("case", ["overflow in an exact step", "overflow elsewhere"])
def test_a_step_that_overflows_moves_no_second_moment(found, case: str) -> None:
    """Step 9 is exact. The exchange after the skipped step is another one for the same step, so step 10 renews it."""
    assert all(report[case]["moved"] == [10] for report in found)


def test_a_layer_that_is_frozen_at_first_learns_later(found) -> None:
    for report in found:
        moved = report["thawed"]["moved"]
        assert all(0 < most <= BOUND * 1.01 for most in moved[7:])


def test_to_torch_alone_and_back_without_a_jump(found) -> None:
    """Adam's first steps are of one rate, and no later one is of many."""
    for report in found:
        assert all(0 < most <= BOUND * 1.01 for most in report["to and fro"]["moved"])
