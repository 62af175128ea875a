"""A resumed run equals one that never stopped, in every bit."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks
from tests.support.marks import slow
from tests.support.samples import ANY_BUCKET, FEW, keeps_anything, samples

#: Every sample that keeps anything, in several buckets; and one method that does not.
KEEPING: dict[str, dict[str, Any]] = {
    sample.name: {"codec": sample.method, "schedule": "size:10KB", **sample.options}
    for sample in samples()
    if keeps_anything(sample.codec())
}
METHODS = KEEPING | {"none": {"codec": "none"}}
QUICK = {
    **{one.name: METHODS[one.name] for one in samples(few=True) if one.method in FEW},
    "none": METHODS["none"],
}


def _each(methods: Iterable[str]) -> pytest.MarkDecorator:
    """Run a test for each of these methods: `make test` in a job with a method of each kind, or else all."""
    cases = [("quick", method) for method in methods if method in QUICK]
    return pytest.mark.parametrize(
        ("runs", "method"), [*cases, *slow(*(("all", method) for method in methods))], indirect=["runs"], ids=str
    )


@cache
def jobs(which: str) -> dict[str, list[Any]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        # The second job resumes in new processes: with the compression's state, and without.
        for loads in (["nothing"], ["all", "folder", "without residuals"]):
            given = {"folder": folder, "methods": QUICK if which == "quick" else METHODS, "loads": loads}
            reports = run_ranks(2, "resume.py", timeout=300, arguments=given).reports
            found |= {load: [report[load] for report in reports] for load in loads}
    return found


@pytest.fixture(params=["quick"])
def runs(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return jobs(request.param)


@_each(METHODS)
@pytest.mark.parametrize("load", ["all", "folder"])
def test_resume_is_exact(runs, method: str, load: str) -> None:
    for whole, resumed in zip(runs["nothing"], runs[load], strict=True):
        assert whole[method]["middle"] == resumed[method]["middle"]
        assert whole[method]["end"] == resumed[method]["end"]
        assert whole[method]["end"]["step"] == 20


@_each(METHODS)
def test_the_two_states_differ(runs, method: str) -> None:
    """Or equality would say nothing."""
    for whole in runs["nothing"]:
        assert whole[method]["middle"]["weights"] != whole[method]["end"]["weights"]
        if method in KEEPING:
            assert whole[method]["middle"]["residuals"] != whole[method]["end"]["residuals"]
            assert whole[method]["middle"]["has residuals"] and whole[method]["end"]["has residuals"]


@_each(KEEPING)
def test_without_the_compression_state_the_run_goes_elsewhere(runs, method: str) -> None:
    for whole, other in zip(runs["nothing"], runs["without residuals"], strict=True):
        assert whole[method]["end"]["weights"] != other[method]["end"]["weights"]


def test_residuals_belong_to_their_rank(runs) -> None:
    """Tables of a sum over ranks are the same on all; what is kept for each element is not."""
    own = {sample.name for sample in samples() if sample.codec().layout(ANY_BUCKET, 1).state}
    assert own < set(KEEPING)
    for method in KEEPING.keys() & QUICK.keys():
        assert len({report[method]["end"]["residuals"] for report in runs["nothing"]}) == 1 + (method in own)
