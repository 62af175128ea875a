"""Adam's second moment under Horovod's optimizer, in real processes."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, "held.py", timeout=120).values()


def test_it_is_held_on_both_paths_unless_somebody_asks_for_the_optimizer_s_own(found) -> None:
    for report in found:
        case = report["paths"]
        assert case["stock"] == case["attached"] != case["own"]
        assert case["attached holds"] == case["stock holds"] == case["tensors"] and case["own holds"] == 0
        assert set(case["ranks"]) == {case["stock"]}


def test_the_state_may_be_broadcast_before_attach_or_after_it(found) -> None:
    for report in found:
        before, after, never = report["broadcast"]
        assert before == after != never  # Adam counts the step that Horovod makes


def test_resume_is_exact(found) -> None:
    assert all(report["resumed"] == [True, True, False] for report in found)


def test_resume_is_the_same_on_both_paths(found) -> None:
    for report in found:
        case = report["resumed on both paths"]
        assert set(case["restore"]) == set(case["whole"])
        assert len(set(case["reset"])) == 1 and case["reset"][0] != case["whole"][0]


def test_clipping_after_synchronize(found) -> None:
    for report in found:
        (free, clipped), other = report["clipped"]
        assert other == [free, clipped] and clipped <= 1.5e-3 < 0.01 < free


def test_the_kernel_does_what_torch_s_step_does(found) -> None:
    for report in found:
        case = report["who steps"]
        assert case["auto moved"] == case["tensors"] and case["torch moved"] == 0
        assert len(set(case["auto"])) == len(set(case["torch"])) == 1
        assert case["apart"] < 1e-4 and case["auto state"] == case["torch state"] == ["exp_avg", "exp_avg_sq", "step"]


def test_each_way_of_horovod_s_is_one_step(found) -> None:
    for report in found:
        case = report["ways to step"]
        for front in ("attached", "stock"):
            one, *others = [case[f"{path}, {front}"] for path in ("step", "synchronize", "synchronize twice")]
            assert one[1] and others == [one, one]
        counts = {name: number for name, number in case.items() if name.endswith("counts")}
        assert len(counts) == 6
        assert all(number == [36.0 if "stock" in name else 12.0] for name, number in counts.items())
        assert not any(number for name, number in case.items() if name.endswith("pays"))


def test_a_second_moment_that_differs_is_noticed(found) -> None:
    assert all(report["planted"].startswith("MismatchError") for report in found)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("other options", "warmup_steps=4 and rebuild_every=5, .* on rank 0, and shared with warmup_steps=5"),
        ("other steps", r"who does the optimizer's step \(step=\) differs between ranks: rank 0 = 'auto', rank 1 = 't"),
        ("other moments", "second moment of the optimizer is shared .* on rank 0, and its own on rank 1"),
        ("other optimizers", "the optimizer's class differs between ranks: rank 0 = 'Adadelta', rank 1 = 'Adam'"),
    ],
)
def test_ranks_that_hold_differently_are_refused(found, case: str, said: str) -> None:
    assert all(report[case].startswith("MismatchError") and re.search(said, report[case]) for report in found)


def test_optimizers_that_it_is_not_for(found) -> None:
    assert all('ConfigError: second_moment="shared" is for Adam' in report["not for it"] for report in found)


def test_momentum_upon_momentum_is_refused(found) -> None:
    for report in found:
        assert all("ConfigError: SGD has momentum=0.9, and dgc" in text for text in report["momentum twice"])
