"""`hvd-compress headroom` with real ranks."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks

pytestmark = pytest.mark.alone


@pytest.mark.slow
@pytest.mark.parametrize(("front", "name"), [("horovod", "horovod"), ("torch", "ddp")])
def test_two_ranks_measure_and_one_tells(front: str, name: str) -> None:
    contestants = [f"{name} fp32", f"{name} fp16", "none", "marsit"]
    argv = ["--json", "headroom", "--elements", "5000", "--repeat", "8", "--compute-ms", "50"]
    job = run_ranks(2, "headroom.py", arguments={"argv": argv}, front=front)
    assert [report["status"] for report in job.reports] == [0, 0], job.tail()
    assert "were dropped" not in job.output and "handed back without the norm" not in job.output
    (line,) = (line for line in job.lines() if '"bench"' in line)
    found = json.loads(line)
    assert found["ranks"] == 2 and found["elements"] == 5000
    assert [timing["name"] for timing in found["timings"]] == contestants
    assert all(0 < timing["median_seconds"] < 10 for timing in found["timings"])
    assert found["against"] in contestants[:3] and 0 < found["most_step_gain"] < 1
