"""`hvd-compress headroom` with real ranks."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks

pytestmark = pytest.mark.alone

CONTESTANTS = ["horovod fp32", "horovod fp16", "none", "marsit"]


@pytest.mark.slow
def test_two_ranks_measure_and_one_tells() -> None:
    argv = ["--json", "headroom", "--elements", "5000", "--repeat", "2", "--compute-ms", "50"]
    job = run_ranks(2, "headroom.py", arguments={"argv": argv})
    assert [report["status"] for report in job.reports] == [0, 0], job.tail()
    (line,) = (line for line in job.output.splitlines() if '"bench"' in line)
    assert line.startswith("[0]<stdout>:")
    found = json.loads(line.partition(">:")[2])
    assert found["ranks"] == 2 and found["elements"] == 5000
    assert [timing["name"] for timing in found["timings"]] == CONTESTANTS
    assert all(0 < timing["median_seconds"] < 10 for timing in found["timings"])
    assert found["against"] in CONTESTANTS[:3] and 0 < found["most_step_gain"] < 1
