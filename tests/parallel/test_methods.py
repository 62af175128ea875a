"""Methods under stock Horovod, in real processes."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks
from tests.support.samples import samples

SAMPLES = [sample.name for sample in samples()]
CASES = [*SAMPLES, "per layer", "by step", "warm-up", "marsit every", "marsit small tensors plain"]


@pytest.fixture(
    scope="module", params=[pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow), 4]
)
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    job = run_ranks(request.param, "methods.py", timeout=300)
    for report in job.reports:
        errors = {name: case["traceback"] for name, case in report.items() if case["error"]}
        assert not errors, errors
    return [{name: case["value"] for name, case in report.items()} for report in job.reports]


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_and_both_paths_hold_the_same_bits_after_every_step(found, case: str) -> None:
    mine = found[0][case]
    assert all(report[case]["stock"] == mine["stock"] for report in found)
    for digests in mine["stock"]:
        assert len(digests) == len(found) and len(set(digests)) == 1
    assert mine["attached"] == mine["stock"]
    # The model moved in every step: equal digests of a model that stands still say nothing.
    assert len({digests[0] for digests in mine["stock"]}) == len(mine["stock"])


@pytest.mark.parametrize("case", CASES)
def test_every_step_was_verified(found, case: str) -> None:
    for report in found:
        assert report[case]["stats"]["verified"] == report[case]["stats"]["steps"] == 5


def test_mean_is_that_of_horovod(found) -> None:
    # Two addends have one order of addition; with more, the order is ours.
    limit = 0.0 if len(found) == 2 else 1e-6
    for report in found:
        assert report["none"]["from baseline"] <= limit
        assert report["marsit every"]["from baseline"] <= max(limit, 1e-7)
        assert 0 < report["fp16"]["from baseline"] < 1e-3
        assert 0 < report["bf16"]["from baseline"] < 1e-2


def test_compressed_rounds_are_another_thing(found) -> None:
    """The positive control: what does more than round is not the mean."""
    for sample in samples():
        law = sample.codec().law()
        if not (law.unbiased and law.conserves):
            assert found[0][sample.name]["from baseline"] > 1e-6, sample.name
    assert found[0]["marsit small tensors plain"]["from baseline"] > 1e-4


def test_methods_give_different_bits(found) -> None:
    """No two methods end with the same model; with 2 ranks "none" and "marsit every" do."""
    last = {s.method: found[0][s.name]["stock"][-1][0] for s in samples() if s.number == 0}
    assert len(set(last.values())) == len(last) > 1


def test_after_shutdown_and_init(found) -> None:
    first, attached, stock = found[0]["init again"]
    assert first == attached == stock
    assert len({digests[0] for digests in first}) == len(first)
