"""Methods under stock Horovod, in real processes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks
from tests.support.marks import slow
from tests.support.samples import samples

OTHERS = ["per layer", "by step", "warm-up", "marsit every", "marsit small tensors plain"]
FEW = [*(sample.name for sample in samples(few=True)), *OTHERS]
CASES = [*(sample.name for sample in samples()), *OTHERS]
QUICK = (3, True)  # so many ranks, and the first sample of a method of each kind
ALL = [(2, False), (3, False), (4, False)]
each_job = pytest.mark.parametrize("found", [QUICK, *slow(*((job,) for job in ALL))], indirect=True, ids=str)
each_case = pytest.mark.parametrize(
    ("found", "case"),
    [*((QUICK, case) for case in FEW), *slow(*((job, case) for job in ALL for case in CASES))],
    indirect=["found"],
    ids=str,
)


@cache
def reports(world: int, few: bool) -> list[dict[str, Any]]:
    # Forks in `make test`, where those of test_ddp.py hash strings each in its own way.
    return run_ranks(world, "methods.py", timeout=300, arguments={"few": few}, launched=not few).values()


@pytest.fixture
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return reports(*request.param)


@each_case
def test_all_ranks_and_both_paths_hold_the_same_bits_after_every_step(found, case: str) -> None:
    mine = found[0][case]
    assert all(report[case]["stock"] == mine["stock"] for report in found)
    for digests in mine["stock"]:
        assert len(digests) == len(found) and len(set(digests)) == 1
    assert mine["attached"] == mine["stock"]
    # The model moved in every step: equal digests of a model that stands still say nothing.
    assert len({digests[0] for digests in mine["stock"]}) == len(mine["stock"])


@each_case
def test_every_step_was_verified(found, case: str) -> None:
    for report in found:
        assert report[case]["stats"]["verified"] == report[case]["stats"]["steps"] == 5


@each_job
def test_mean_is_that_of_horovod(found) -> None:
    # Two addends have one order of addition; with more, the order is ours.
    limit = 0.0 if len(found) == 2 else 1e-6
    for report in found:
        assert report["none"]["from baseline"] <= limit
        assert report["marsit every"]["from baseline"] <= max(limit, 1e-7)
        assert 0 < report["fp16"]["from baseline"] < 1e-3


@each_job
def test_compressed_rounds_are_another_thing(found) -> None:
    """The positive control: what does more than round is not the mean."""
    for sample in (sample for sample in samples() if sample.name in found[0]):
        law = sample.codec().properties().law
        if not (law.unbiased and law.conserves):
            assert found[0][sample.name]["from baseline"] > 1e-6, sample.name
    assert found[0]["marsit small tensors plain"]["from baseline"] > 1e-4


@each_job
def test_methods_give_different_bits(found) -> None:
    """No two methods end with the same model, but those that are exact: they may add in the same order."""
    firsts = [sample for sample in samples() if sample.number == 0 and sample.name in found[0]]
    last = {sample.method: found[0][sample.name]["stock"][-1][0] for sample in firsts}
    exact = last.pop("homomorphic", None)
    assert exact == last["none"] or len(found) > 2  # two addends have one order
    assert len(set(last.values())) == len(last) > 1


@each_job
def test_after_shutdown_and_init(found) -> None:
    first, attached, stock = found[0]["init again"]
    assert first == attached == stock
    assert len({digests[0] for digests in first}) == len(first)
