"""A host whose link is cut, while both ends go on: every rank ends by itself, in time, and says which one is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.lab import Lab
from tests.faults import JOBS
from tests.support.marks import needs_lab

WORLD, VICTIM, STEP, STEPS = 3, 1, 3, 6
TIMEOUT, SLACK = 4.0, 30.0


pytestmark = [pytest.mark.slow, needs_lab()]


def _train(victim: int | None, method: str, front: str) -> dict[int, dict[str, Any]]:
    case = {"front": front, "victim": victim, "step": STEP, "steps": STEPS, "timeout": TIMEOUT, "method": method}
    with Lab(WORLD) as lab:
        outcome = lab.run("cut", [str(JOBS / "cut.py"), json.dumps(case)], limit=120.0)
    return {record["rank"]: record for record in outcome.records}


@pytest.mark.parametrize("front", ["horovod", "torch"])
@pytest.mark.parametrize("method", ["marsit", "topk", "none"])
def test_a_link_that_is_cut(method: str, front: str) -> None:
    found = _train(VICTIM, method, front)
    assert set(found) == set(range(WORLD))
    for rank, record in found.items():
        assert record["error"] == "ExchangeError" and record["steps"] == STEP, record
        assert record["seconds"] < TIMEOUT + SLACK, record
        if rank != VICTIM:
            assert f"No sign of life from rank(s) {VICTIM}" in record["text"], record


@pytest.mark.parametrize("front", ["horovod", "torch"])
def test_control(front: str) -> None:
    for record in _train(None, "marsit", front).values():
        assert (record["error"], record["steps"]) == (None, STEPS), record
