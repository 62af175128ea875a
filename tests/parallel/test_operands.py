"""One rank's optimizer, steps, scaler or loaded state differs: every rank says so, before a result would differ."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.jobs import run_ranks
from tests.support.marks import slow

FRONTS = ("torch", "horovod")
V = "the second moment that gradients are divided by differs between ranks"
WORLD = 2
#: What is said, and in which step.
SAID = {
    "eps": ("the optimizer's eps differs between ranks: rank 0 = '1e-08', rank 1 = '0.01'", 0),
    "betas": ("the optimizer's betas differs", 0),
    "rate": ("the optimizer's lr differs between ranks: rank 0 = '0.01', rank 1 = '0.02'", 0),
    "decay": ("the optimizer's weight_decay differs", 0),
    "betas later": (V, 5),
    "state": (V, 5),
    "skips one": (V, 5),
    "skips the last exact one": ("the kind of round differs between ranks: rank 0 = 'compressed', rank 1 = 'exact'", 5),
    "skips one before an exact one": ("the kind of round differs .* rank 0 = 'exact', rank 1 = 'compressed'", 9),
    "weights": (V, 5),
    "tables": ("what the tables of the method hold differs", 5),
    "scaler": ("the scale of the gradient scaler differs between ranks: rank 0 = '256.0', rank 1 = '512.0'", 0),
}
SAID_UNDER_HOROVOD = {
    "operation": ("what results are multiplied by differs between ranks: rank 0 = '1', rank 1 = '2'", 0),
    "updates, eps": ("the optimizer's eps differs", -1),
    "updates, rate later": ("the optimizer's lr differs .* rank 1 = .0.02.", 2),
    "updates, betas later": (V, 7),
}


@pytest.fixture(scope="module", params=[*slow("torch"), "horovod"])
def found(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    job = run_ranks(WORLD, "operands.py", timeout=150, arguments={"world": WORLD}, front=request.param)
    return request.param, job.values()


def test_every_difference_is_named_in_time(found) -> None:
    front, reports = found
    for report in reports:
        for name, (said, step) in {**SAID, **(SAID_UNDER_HOROVOD if front == "horovod" else {})}.items():
            case = report[name]
            assert case["kind"] == "MismatchError" and re.search(said, case["said"]), (name, case)
            assert case.get("at", 0) == step and not case.get("silent"), (name, case)
            assert "hardware" not in case["said"]


def test_nothing_is_found_where_nothing_differs(found) -> None:
    front, reports = found
    for report in reports:
        for name in ("equal", *(["updates, equal"] if front == "horovod" else [])):
            assert report[name]["kind"] == "" and not report[name]["silent"]


@slow
@pytest.mark.parametrize("front", FRONTS)
def test_no_silent_difference_in_fifty_draws(front: str) -> None:
    """Whatever one rank does otherwise, gradients are equal on all ranks until an error names a difference."""
    for report in run_ranks(WORLD, "operands_fuzz.py", timeout=280, arguments={"world": WORLD}, front=front).values():
        assert report["silent"] == []
        assert report["drawn"] == 50 and report["refused"] >= 20  # some draws change nothing that matters
