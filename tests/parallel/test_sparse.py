"""Whose gradients are sparse is the same on every rank, or refused on every rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import needs_front, run_ranks
from tests.support.marks import slow

WORLD = 3


@pytest.fixture(scope="module", params=["horovod", *slow("torch")])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    needs_front(request.param)
    return run_ranks(WORLD, "sparse.py", timeout=100.0, front=request.param).values()


@pytest.mark.timeout(130)
def test_a_gradient_that_is_sparse_on_one_rank_only_is_refused_on_all(found: list[dict[str, Any]]) -> None:
    """Its bucket would be skipped there, and frames of the next one taken for this one's: Gloo aborts the process."""
    ways = [name.partition(" ")[2] for name in found[0] if name.startswith("one ")]
    assert len(ways) == 2
    for way in ways:
        said = {report[f"one {way}"] for report in found}
        expected = (
            f"MismatchError: the gradient of one_{way}.weight is sparse on rank(s) 1, and dense or none on rank(s) "
        )
        assert all(text.startswith(expected) for text in said)
        # Of ranks that have not said theirs when one is told, it knows nothing.
        assert all(text.removeprefix(expected).startswith(("0, 2;", "0;", "2;")) for text in said)


@pytest.mark.timeout(130)
def test_with_sparse_gradients_on_all_ranks_they_go_on(found: list[dict[str, Any]]) -> None:
    """The control; under Horovod also where a batch has no words on some ranks, which alone cannot do that."""
    for name in found[0]:
        weights = {report[name] for report in found}
        assert name.startswith("one ") or (len(weights) == 1 and " " not in next(iter(weights)))
