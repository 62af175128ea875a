"""Ranks that differ in one field are refused at the start, on every rank, with a reason."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks
from tests.support.marks import slow

pytestmark = pytest.mark.alone

WORLD, ODD = 3, 1

# What the message must name: the field, the odd value and the usual one.
DIFFERENT = {
    "seed": ("seed", "8", "7"),
    "full_precision_every": ("full_precision_every", "4", "5"),
    "step_size": ("step_size", "'tensor'", "'row'"),
    "compensation": ("compensation", "'none'", "'own'"),
    "zeros": ("zeros", "'positive'", "'random'"),
    "schedule": ("schedule", "'single'", "'layerwise'"),
    "plan": ("schedule", "plan ", "plan "),
    "exchange": ("exchange", "'ring'", "'fold'"),
    "nonfinite": ("nonfinite", "'zero'", "'raise'"),
    "verify_every": ("verify_every", "10", "11"),
    "min_elements": ("min_elements", "3", "2"),
    "timeout": ("timeout", "9.0", "8.0"),
    "method": ("method", "'fp16'", "'bf16'"),
    "shape": ("parameter", "[2, 9]", "[2, 8]"),
    "dtype": ("parameter 0", "float64", "float32"),
    "name": ("parameter 3", "odd.weight", "0.weight"),
    "count": ("number of parameters", "2", "4"),
    "wire version": ("wire version", "99", "2"),
    "package version": ("package version", "'9.9.9'", "'"),
}
INVALID = {
    "invalid": ("full_precision_every", "-1"),
    "unknown": ("no option 'full_precission_every'", "full_precision_every"),
    "transport": ("transport", '"local"'),
    "integer parameter": ("no parameter that needs a gradient",),
    "method before": ("a method should be a name",),
    "pattern before": ("the method of pattern '*'", "5"),
    "parameters before": ("RuntimeError: this rank cannot read its model",),
    "any other error": ("KeyError: 'a bug'",),
}


@pytest.fixture(scope="module", params=["horovod", *slow("torch")])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    job = run_ranks(WORLD, "handshake.py", timeout=200, front=request.param, launched=True)
    for report in job.reports:
        assert not [case["traceback"] for case in report.values() if case["error"]]
    return [{name: case["value"] for name, case in report.items()} for report in job.reports]


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_difference_is_refused_everywhere(found, name: str) -> None:
    field, odd, usual = DIFFERENT[name]
    for report in found:
        case = report[name]
        assert case["kind"] == "MismatchError" and case["seconds"] < 10, case
        text = case["text"]
        assert f"agree on {field}" in text
        head, _, rest = text.partition(f"rank {ODD} = ")
        assert "ranks 0, 2 = " in head and usual in head and odd in rest
    assert len({report[name]["text"] for report in found}) == 1


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_rank_stops_every_rank(found, name: str) -> None:
    for report in found:
        case = report[name]
        assert case["kind"] == "ConfigError" and case["seconds"] < 10, case
        assert f"rank {ODD} cannot start: " in case["text"]
        assert all(part in case["text"] for part in INVALID[name]), case


def test_equal_ranks_are_accepted(found) -> None:
    """The control, before and after all refusals."""
    for report in found:
        assert report["control"]["kind"] == report["control again"]["kind"] == "accepted"


def test_a_rank_that_never_comes_is_noticed_in_time(found) -> None:
    for rank, report in enumerate(found):
        case = report["absent"]
        if rank == ODD:
            continue
        assert case["kind"] == "ExchangeError" and case["recoverable"]
        assert 1.4 < case["seconds"] < 6
        assert f"rank {rank}: not every rank came to the handshake within 1.5 s. " in case["text"]
        assert "same order" in case["text"] and "Horovod" not in case["text"]
        assert f"Rank(s) {ODD} never came: look at their output" in case["text"]
