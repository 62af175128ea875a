"""A step in the steady state on a device: its timeline, and what of it makes the host wait for the GPU."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.support import timelines
from tests.support.jobs import ROOT, needs_front, run_ranks

WORLD = 2
gpu, slow = pytest.mark.gpu, pytest.mark.slow
PLACES = [
    pytest.param(("torch", "staged", "digits"), marks=slow),
    *(pytest.param((front, "cuda:0", "text"), marks=gpu) for front in ("horovod", "torch")),
]


@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_one_step_has_a_timeline(place: tuple[str, str, str], record_property: Callable[[str, object], None]) -> None:
    """How often the host waits is a figure beside the result, not a condition."""
    front, device, task = place
    if task == "digits":
        pytest.importorskip("sklearn")
    needs_front(front)
    given = {"device": device, "task": task, "methods": ["none", "marsit", "topk"]}
    reports = run_ranks(WORLD, "steady.py", timeout=280, arguments=given, front=front).values()
    for rank, report in enumerate(reports):
        for method, found in report.items():
            check_trace(found["trace"])
            if device.startswith("cuda"):  # the timeline stays beside the results
                (ROOT / "build" / "gpu").mkdir(parents=True, exist_ok=True)
                (ROOT / f"build/gpu/trace.{method}.{front}.rank{rank}.json").write_text(found["trace"])
            if rank == 0 and "runtime calls" in found:
                noticed = found["noticed by torch"]  # by the lines of the code
                counts = {"noticed by torch": sum(noticed.values()), **found["runtime calls"], "at": noticed}
                record_property(f"waits of the host in a step, {method}", counts)


def check_trace(text: str) -> None:
    events = json.loads(text)["traceEvents"]
    timelines.check(events)
    assert len(timelines.spans(events, "steps")) >= 1
    assert any(span["name"].startswith("exchange") for span in timelines.spans(events, "bucket"))
