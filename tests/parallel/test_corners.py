"""Steps that begin, end or resume unusually."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(2, "corners.py", timeout=240).reports


def value(found: list[dict[str, Any]], name: str) -> list[Any]:
    """Return every rank's value of one check of the job."""
    errors = [report[name].get("traceback") for report in found]
    assert not any(errors), next(filter(None, errors))
    return [report[name]["value"] for report in found]


@pytest.mark.parametrize("name", ["filled by hand", "odd last batch", "sparse alone"])
def test_is_as_with_horovod_alone(found, name: str) -> None:
    for distances in value(found, name):
        assert max(distances) < 2e-6


def test_one_step_can_be_taken_back(found) -> None:
    assert value(found, "back one step") == [[True, True]] * 2


def test_training_goes_on_after_a_nan_that_raised(found) -> None:
    for paths in value(found, "after NaN"):
        for path in paths:
            before, during, after = path["texts"]
            assert before == after == "accepted"
            assert "NonFiniteError" in during and "first on rank 0" in during
            assert len(set(path["ranks"])) == 1


def test_a_closed_compression_says_so(found) -> None:
    for text in value(found, "after close"):
        assert "ConfigError" in text and "closed" in text


def test_state_is_refused_within_a_step_only(found) -> None:
    for during, after in value(found, "in a step"):
        assert "between steps only" in during and after == "accepted"


def test_other_operations_are_refused_without_attach_too(found) -> None:
    for text in value(found, "op Max"):
        assert "only op=hvd.Average and op=hvd.Sum" in text


def test_ranks_that_resume_at_different_steps_are_refused(found) -> None:
    for text in value(found, "one rank resumes"):
        assert "MismatchError" in text and "rank 0 at step 0, rank 1 at step 7" in text


def test_ranks_that_resume_with_different_buckets_are_refused(found) -> None:
    for text in value(found, "one rank has other buckets"):
        assert "MismatchError" in text and "the buckets differ between ranks, on rank(s) 1 from the others" in text
