"""Modules that are not wrapped, on several ranks; test_fronts.py compares their results with those of both wrappers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import run_ranks


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return run_ranks(2, "plain.py", timeout=200.0, front="torch").reports


def test_none_is_what_torch_s_wrapper_does(reports: list[dict[str, Any]]) -> None:
    """With parameters that no rank uses, or some only; accumulation, clipping, sparse gradients, checkpoints."""
    assert len(reports[0]["ways"]) == 6
    for name, found in reports[0]["ways"].items():
        assert found["far"] < 1e-6 < 0.01 < found["moved"], (name, found)
        assert found["compressed"] != found["weights"]  # the control: topk drops something
        assert found == reports[1]["ways"][name]


def test_ranks_begin_with_what_rank_0_has(reports: list[dict[str, Any]]) -> None:
    (first, begun), (other, theirs) = (report["alike"] for report in reports)
    assert first == begun == theirs != other


def test_how_weights_lie_is_nothing_to_the_wrapper(reports: list[dict[str, Any]]) -> None:
    """Its buckets have gradients as weights lie; masks, and all that is kept by element, are of their numbers."""
    assert reports[0]["laid"] == reports[1]["laid"]
    for number, (plain, wrapped) in enumerate(reports[0]["laid"]):
        assert plain == wrapped, number
        assert (plain[1] == 0) == (number >= 2)  # masked; the control without a mask moves those weights


def test_weights_that_are_laid_anew_behind_the_wrapper_are_refused(reports: list[dict[str, Any]]) -> None:
    """Torch's buckets stay as they were, so gradients would go to other elements; torch may only warn."""
    for report in reports:
        for when, told in report["laid anew"].items():
            assert "weight no longer lies in memory as it did" in told, when
        assert len(report["laid anew"]) == 5
        assert set(report["laid alike"]) == {"accepted"}  # the control: rows of one element, and gaps


@pytest.mark.parametrize("way", ["plain", "wrapped", "views"])
def test_gradients_that_are_dropped_are_not_taken_for_added_up(reports: list[dict[str, Any]], way: str) -> None:
    """When the first bucket comes, a pass has filled gradients that a program has cleared before it."""
    for number, report in enumerate(reports):
        tells = int(number == 0)
        used, half, of_two_passes, on_top = report["dropped"][way]
        assert used == [False, 0, 0]
        assert half == of_two_passes == [False, 0, tells]
        assert on_top == [True, tells, 0]  # the control
        assert report["dropped in 16 bits"] == [[False, 0, tells]]
        assert report["dropped by methods that keep nothing"] == [[False, 0, 0]] * 2


def test_residuals_follow_a_scaler(reports: list[dict[str, Any]]) -> None:
    assert all(report["scaled"] == [1.0, 0.5, 1.0] for report in reports)


def test_two_models_in_one_pass(reports: list[dict[str, Any]]) -> None:
    """Each rank has used another layer, and has come to the two models in another order."""
    assert all(report["two models"] == [[0.5] * 4] * 4 for report in reports)


def test_modules_that_differ_are_refused_on_all_ranks(reports: list[dict[str, Any]]) -> None:
    texts = [report["mismatch"] for report in reports]
    assert all(text.startswith("MismatchError: the modules given to register() differ") for text in texts)
    assert "rank 1 has 1.running_mean of type float32 and shape (2,)" in texts[0]


def test_a_rank_that_goes_on_after_an_error_stops_the_others(reports: list[dict[str, Any]]) -> None:
    text = "an error has ended a backward pass in the middle, after 3 of 4 gradients"
    assert all(text in report["interrupted"] for report in reports), [report["interrupted"] for report in reports]


def test_rounds_that_no_second_moment_makes_exact_are_told_of_once(reports: list[dict[str, Any]]) -> None:
    (held, *others), theirs = (report["ignored"] for report in reports)
    assert held == [] and theirs == [[]] * 5
    assert [len(texts) for texts in others] == [1] * 4
    assert all(text.startswith("ignored: warmup_steps=5, as ranks share no second moment") for (text,) in others)
    assert ["give warmup_steps= to the compression" in text for (text,) in others] == [True] * 3 + [False]


def test_a_divided_model_is_refused_where_its_parts_are_exchanged_with_each_other(
    reports: list[dict[str, Any]],
) -> None:
    for report in reports:
        told, alone = report["divided"]
        assert "weight is divided among ranks" in told and "import horovod_compress.fsdp instead" in told
        assert alone == "accepted"


def test_a_wrapper_that_averages_as_well_is_refused_on_all_ranks(reports: list[dict[str, Any]]) -> None:
    text = "this model is trained in DistributedDataParallel, which averages its gradients too"
    assert all(text in told for report in reports for told in report["averaged"])


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused(reports: list[dict[str, Any]]) -> None:
    text = "was applied or taken away in the backward pass, as by an optimizer's step in a hook"
    assert all(len(report["stepped"]) == 4 for report in reports)
    assert all(text in found for report in reports for found in report["stepped"]), reports[0]["stepped"]


def test_whoever_goes_on_after_an_interrupted_wait_is_told(reports: list[dict[str, Any]]) -> None:
    text = (
        "an error has ended a backward pass in the middle, after 4 of 4 gradients were handed over and while it waited"
    )
    assert all(text in found for report in reports for found in report["cut off"]), reports[0]["cut off"]


def test_what_an_optimizer_trains_and_nobody_exchanges_is_told_of_once(reports: list[dict[str, Any]]) -> None:
    """A layer that was added, or all that the compression was not given; not what another compression exchanges."""
    (added, more, two), *others = (report["strangers"] for report in reports)
    assert len(added) == len(more) == 1 and not two and not any(map(any, others))
    assert (
        "parameter 0 of group 1, of shape (1, 3)" in added[0] and "no compression of this program exchanges" in added[0]
    )
    assert "parameter 2 of group 0, of shape (1, 3)" in more[0]


def test_a_layer_that_was_replaced_is_told_of_though_its_optimizer_is_not_attached(
    reports: list[dict[str, Any]],
) -> None:
    """Not what another compression exchanges, or what is trained beside the module."""
    (at_once, late, exchanged, other), *others = (report["replaced"] for report in reports)
    assert len(at_once) == len(late) == 1 and not exchanged and not other and not any(map(any, others))
    assert all("1.weight, 1.bias: the optimizer has it" in text for text in (*at_once, *late))


def test_a_frozen_parameter_loses_what_one_rank_has_accumulated(reports: list[dict[str, Any]]) -> None:
    assert all(report["frozen"] == [True] * 5 for report in reports)
