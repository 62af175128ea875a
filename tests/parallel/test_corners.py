"""Steps that begin, end or resume unusually."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks, values_of


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, "corners.py", timeout=240).reports


@pytest.mark.parametrize("name", ["filled by hand", "odd last batch", "sparse alone"])
def test_is_as_with_horovod_alone(found, name: str) -> None:
    for distances in values_of(found, name):
        assert max(distances) < 2e-6


def test_one_step_can_be_taken_back(found) -> None:
    assert values_of(found, "back one step") == [[True, True]] * 2


def test_training_goes_on_after_a_nan_that_raised(found) -> None:
    for paths in values_of(found, "after NaN"):
        for path in paths:
            before, during, after = path["texts"]
            assert before == after == "accepted"
            assert "NonFiniteError" in during and "first on rank 0" in during
            assert len(set(path["ranks"])) == 1


def test_a_closed_compression_says_so(found) -> None:
    for text in values_of(found, "after close"):
        assert "ConfigError" in text and "closed" in text


def test_state_is_refused_within_a_step_only(found) -> None:
    for during, after in values_of(found, "in a step"):
        assert "between steps only" in during and after == "accepted"


def test_other_operations_are_refused_without_attach_too(found) -> None:
    for text in values_of(found, "op Max"):
        assert "only op=hvd.Average and op=hvd.Sum" in text


def test_ranks_that_resume_at_different_steps_are_refused(found) -> None:
    for text in values_of(found, "one rank resumes"):
        assert "MismatchError" in text and "rank 0 at step 0, rank 1 at step 7" in text


def test_ranks_that_resume_with_different_buckets_are_refused(found) -> None:
    for text in values_of(found, "one rank has other buckets"):
        assert "MismatchError" in text and "the buckets differ between ranks, on rank(s) 1 from the others" in text


def test_a_state_may_be_loaded_between_backward_and_step(found) -> None:
    for paths in values_of(found, "rolled back"):
        assert paths == [[True, "accepted", 1]] * 2


def test_a_copy_of_a_compression_is_none_and_says_so(found) -> None:
    for paths in values_of(found, "copied"):
        for refusals, texts in paths:
            assert all(text.startswith("ConfigError: a compression cannot be copied") for text in refusals)
            assert sum("is not saved or copied with its model or optimizer" in text for text in texts) == 1
            assert sum("a copy of an optimizer of Horovod's has no compression" in text for text in texts) == 2


def test_a_state_loaded_amid_the_gradients_is_refused_at_once(found) -> None:
    for paths in values_of(found, "rolled back in the middle"):
        for text, seconds in paths:
            assert text.startswith("ConfigError") and "2 gradient(s) still missing (1." in text and seconds < 2.0


def test_gradients_after_a_step_left_out_are_reduced(found) -> None:
    assert values_of(found, "step left out") == [[1.5, 1.5]] * 2


def test_a_closure_is_refused(found) -> None:
    for paths in values_of(found, "closure"):
        assert all("ConfigError" in text and "call the closure before step()" in text for text in paths)


def test_a_parameter_that_nobody_reduces_is_told_once(found) -> None:
    assert values_of(found, "unfrozen later") == [[1, 1], [0, 0]]
    assert all("ConfigError" in text and "is not exchanged" in text for text in values_of(found, "unfrozen in updates"))


def test_a_state_of_the_other_mode_is_refused(found) -> None:
    for gradients, updates in values_of(found, "other mode"):
        for right, wrong in ((gradients[:2], gradients[2:]), (updates[2:], updates[:2])):
            assert right == ["accepted", "accepted"] and wrong[1] == "accepted"
            assert "StateError" in wrong[0] and "a different mode" in wrong[0]


def test_a_held_second_moment_moves_however_many_exchanges_a_step_has(found) -> None:
    for once, twice in values_of(found, "exact rounds"):
        assert (once, twice) == ([10], [5, 8, 11, 14])  # exchanges 10, 16, 22 and 28, of two for each step


def test_a_scale_that_was_loaded_is_saved_again(found) -> None:
    assert values_of(found, "scale kept") == [[8.0, 8.0]] * 2


def test_a_scaler_that_comes_before_the_exchange_is_over_is_refused(found) -> None:
    for paths in values_of(found, "scaler too soon"):
        for unscale, step, *after in paths:
            assert all("ConfigError" in text and "optimizer.synchronize() first" in text for text in (unscale, step))
            assert after == ["accepted", "accepted"]
