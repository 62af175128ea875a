"""`hvd-compress plan --measure` with real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")

from horovod_compress.schedule.plan import Plan
from tests.support.jobs import run_ranks

pytestmark = pytest.mark.alone

SHAPES = "name,shape,macs\nfirst.weight,200x300,9\nfirst.bias,300,0\nlast.weight,300x50,4\n"


@pytest.mark.slow
def test_two_ranks_measure_what_was_predicted(tmp_path: Path) -> None:
    (tmp_path / "tiny.csv").write_text(SHAPES)
    argv = ["--json", "plan", "--measure", "--model", str(tmp_path / "tiny.csv"), "--compute-ms", "20", "--repeat", "3"]
    argv += ["--method", "topk", "--option", "density=0.05", "--save", str(tmp_path / "plan.json")]
    job = run_ranks(2, "headroom.py", arguments={"argv": argv})
    assert [report["status"] for report in job.reports] == [0, 0], job.tail()
    (line,) = (line for line in job.lines() if '"bench"' in line)
    found = json.loads(line)
    assert found["ranks"] == 2 and found["method"] == "topk density=0.05" and found["parameters"] == 75_300
    rows = {row["schedule"]: row for row in found["schedules"]}
    assert list(rows) == ["layerfusion", "layerwise", "single", "size:25MB"] and rows["layerwise"]["buckets"] == 3
    for row in rows.values():
        assert row["model_error"] == pytest.approx(row["model_seconds"] / row["median_seconds"] - 1)
        assert row["bytes_predicted"] <= row["bytes_sent"] < row["bytes_predicted"] + 1000 * row["buckets"]
    assert Plan.load(tmp_path / "plan.json") == Plan.from_document(found["plan"])


@pytest.mark.slow
def test_what_rank_0_cannot_plan_is_an_error_on_all() -> None:
    argv = ["plan", "--measure", "--model", "mlp", "--method", "topk", "--exchange", "ring"]
    job = run_ranks(2, "headroom.py", arguments={"argv": argv})
    assert [report["status"] for report in job.reports] == [2, 2], job.tail()
    assert "topk can be exchanged by gather only" in job.output
