"""Optimizers that are none of Adam's, and parameters that are trained later than planned, on both fronts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import checks_of, needs_front
from tests.support.marks import slow

FRONTS = ("torch", "horovod")
WAYS = ("False", "True", "none")
BOTH = pytest.mark.parametrize("front", [*slow("torch"), "horovod"])


#: For `make test-all`: a late parameter of this kind of optimizer, which `make test` has under the other front.
LATER = {"torch": "SGD", "horovod": "AdamW"}
VALUES = {
    front: checks_of("optimizers.py", [f"late {kind} {way}" for way in (*WAYS, "alone")], timeout=200.0, front=front)
    for front, kind in LATER.items()
}


def values(front: str, name: str) -> list[Any]:
    needs_front(front)
    return VALUES[front](name)


@BOTH
def test_each_is_held_or_named(front: str) -> None:
    for number, found in enumerate(values(front, "kept")):
        for name in ("AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad"):
            assert found[name]["held"] == 4 and not found[name]["told"], name
        assert found["SGD"]["held"] == 0 and not found["SGD"]["told"]
        assert found["Adafactor"]["held"] == 0
        told = found["Adafactor"]["told"]
        assert len(told) == (number == 0) and all("Adafactor computes its second moment" in text for text in told)
    first, second = values(front, "kept")
    assert all(first[name]["weights"] == second[name]["weights"] for name in first)
    assert values(front, "own")[0]["told"] == values(front, "needs none")[0]["told"] == []


@BOTH
def test_several_are_one_with_groups(front: str) -> None:
    first, second = values(front, "several")
    assert first == second and first["groups"] == first["apart"] == first["backwards"] != first["one"]


@BOTH
def test_a_list_of_optimizers_is_refused_with_what_to_write(front: str) -> None:
    for in_list, in_tuple, control in values(front, "in a list"):
        assert "got a list of 2; write attach(first, second), or attach(*optimizers)" in in_list
        assert "got a tuple of 2" in in_tuple and control == "tuple"


def test_one_of_several_that_steps_less_often_is_refused_by_horovod() -> None:
    assert all("backward_passes_per_step" in text for text in values("horovod", "less often"))


def test_one_of_several_may_load_its_state_in_place_of_a_step() -> None:
    first, second = values("horovod", "loaded")
    assert first == second and len({weights for _, weights in first}) == 4
    assert [saved for saved, _ in first] == [4] * 4, "without it: the control; then by either one, and by both"


def test_others_that_step_at_another_pace_are_refused() -> None:
    assert all("one backward_passes_per_step=" in text for text in values("horovod", "other passes"))


def test_results_that_are_handed_over_again_are_left_as_they_are() -> None:
    first, _ = values("horovod", "several")
    assert first["repeated"] == first["apart"]


def test_fronts_hold_the_same() -> None:
    torch_s, horovod_s = (values(front, "kept")[0] for front in FRONTS)
    assert {name: kept["weights"] for name, kept in torch_s.items()} == {
        name: kept["weights"] for name, kept in horovod_s.items()
    }


@pytest.mark.parametrize(
    ("front", "kind"),
    [("torch", "AdamW"), ("horovod", "SGD"), *slow(*LATER.items())],
)
@pytest.mark.parametrize("way", WAYS)
def test_what_was_frozen_at_first_is_trained_as_by_the_framework_and_told_of(front: str, kind: str, way: str) -> None:
    first, second = values(front, f"late {kind} {way}")
    for found in (first, second):
        assert not [text for text in found["early"] if "never reduced" in text]
        assert found["rested"] != found["late"]
    assert first["rested"] == second["rested"] and first["exchanged"] == second["exchanged"]
    assert first["late"] != second["late"]  # each rank trains it on its own data
    (text,) = first["told"]
    assert "1.weight, 1.bias: has a gradient that is never reduced" in text and not second["told"]
    if way == "none":
        assert [found["all"] for found in (first, second)] == values(front, f"late {kind} alone")


def test_an_optimizer_that_nobody_has_told_of_is_named() -> None:
    for number, (other, same) in enumerate(values("torch", "another phase")):
        (texts, error), (control, _) = other, same
        assert len(texts) == (number == 0) and all(text.startswith("SGD makes steps with results") for text in texts)
        assert "already exchanged gradients for AdamW; for another optimizer, close() it" in error and not control


def test_one_whose_parameters_none_that_is_known_has_is_named() -> None:
    for number, (texts, control) in enumerate(values("torch", "others beside")):
        assert len(texts) == (number == 0) and not control
        for text in texts:
            assert (
                text.startswith("AdamW makes steps with results") and "second moment of 3.weight, 3.bias, nor" in text
            )


def test_one_that_makes_the_steps_of_another_one_is_named_while_all_is_exact() -> None:
    for number, (texts, control) in enumerate(values("torch", "others instead")):
        assert len(texts) == (number == 0) and not control
        assert all("has used none of the last 4 exchanges, and until it does" in text for text in texts)


@BOTH
@pytest.mark.parametrize(
    ("case", "keeps"),
    [
        ("AdamW marsit", True),
        ("SGD topk", True),
        ("OddState topk", True),
        ("SparseState topk", False),  # it cannot be known
        ("AdamW bf16", False),
        ("AdamW none", False),
    ],
)
def test_steps_that_are_taken_back_for_the_optimizer_alone(front: str, case: str, keeps: bool) -> None:
    for number, found in enumerate(values(front, f"taken back {case}")):
        alone = found.pop("o")
        assert not any(found.values()), "the controls"
        assert len(alone) == (number == 0 and keeps)
        assert all(text.partition(" was")[0].endswith(f"the state of {case.split()[0]}") for text in alone)


def test_sparse_gradients_that_are_used_first_are_not_taken_for_dropped() -> None:
    assert values("horovod", "sparse first") == [[], []]


def test_one_that_has_made_a_step_with_local_gradients_is_not_blamed_for_dropped_results() -> None:
    texts, other = values("torch", "local step of another")
    (dropped,) = [text for text in texts if "results of" in text]
    assert dropped.startswith("the results of 4 of the last 8 exchanges were dropped") and not other


@BOTH
def test_what_is_thawed_between_compression_and_wrapper_is_refused(front: str) -> None:
    for text in values(front, "thawed between"):
        assert ("were frozen when the compression was created" if front == "torch" else "need a gradient") in text


def test_an_optimizer_that_divides_its_state_among_ranks_is_refused() -> None:
    assert all("ZeroRedundancyOptimizer divides its state" in text for text in values("torch", "zero"))
    assert all("has only this rank's share" in text for text in values("torch", "share of zero"))
    for case in ("zero, own", "zero, fp16", "zero, SGD"):
        first, second = values("torch", case)
        assert first == second and " " not in first, case  # weights, and no error


def test_ranks_hold_the_second_moments_of_the_same_parameters() -> None:
    assert all("of 2 parameters of AdamW" in text for text in values("torch", "different"))
    assert values("torch", "the same") == ["accepted", "accepted"]
