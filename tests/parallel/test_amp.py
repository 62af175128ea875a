"""Gradient scalers change the scale of what waits too; compiled models are trained as others are."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks
from tests.support.marks import slow

JOBS = {
    "quick": ["scaler marsit", "scaler topk", "refusals", "compiled marsit"],
    "rest": ["scaler onebit_adam", "scaler sketch_fusion", "compiled topk"],
}


def each(kind: str) -> pytest.MarkDecorator:
    """Run a test for the reports on every method of a kind of check."""
    cases = {job: [(job, check) for check in checks if check.startswith(kind)] for job, checks in JOBS.items()}
    return pytest.mark.parametrize(("job", "check"), [*cases["quick"], *slow(*cases["rest"])])


@cache
def reports(job: str) -> list[dict[str, Any]]:
    found = run_ranks(2, "amp.py", timeout=240, arguments={"checks": JOBS[job]}).reports
    for report in found:
        errors = {name: case["traceback"] for name, case in report.items() if case["error"]}
        assert not errors, errors
    return [{name: case["value"] for name, case in report.items()} for report in found]


@each("scaler")
def test_a_scale_that_is_followed_leaves_no_trace(job: str, check: str) -> None:
    """Powers of two change no bit of a mantissa, so the weights are those of a run without a scaler."""
    for report in reports(job):
        case = report[check]
        assert case["followed"] == case["plain"]
        assert case["resumed"] == [case["plain"]] * 3
        assert len(set(case["plain"])) == len(case["plain"])
        assert case["left"] != case["plain"]  # the control: what waits does matter


@each("scaler")
def test_a_step_that_is_skipped_is_skipped_on_every_rank(job: str, check: str) -> None:
    first, second = (report[check]["skipped"] for report in reports(job))
    assert first == second and first[3] == first[2] and len(set(first)) == len(first) - 1


def test_one_scaler_once() -> None:
    for report in reports("quick"):
        again, update = report["refusals"]
        assert "once" in again and "updates are not scaled" in update


@each("compiled")
def test_compiled_models_give_the_same_bits_on_every_rank_and_path(job: str, check: str) -> None:
    found = reports(job)
    for report in found:
        case = report[check]
        assert case["stock"] == case["attached"] == found[0][check]["attached"]
        assert len(set(case["stock"])) == len(case["stock"])
