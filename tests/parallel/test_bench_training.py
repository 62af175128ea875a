"""The step-time benchmark as a real job of two ranks, with a small table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")

from benchmarks import step

pytestmark = pytest.mark.alone

TABLE = """\
name,shape,macs
body.0.weight,64x3x7x7,3000
body.0.bias,64,0
body.1.weight,300x400,5000
norm.weight,300,0
head.weight,1000x300,1000
"""
METHODS = ["horovod fp32", "none", "marsit schedule=layerwise"]
UNDER_DDP = ["ddp fp32", "ddp fp16", "ddp powersgd r1", "ddp:topk bucket_cap_mb=1"]
COMPUTE_SECONDS = 0.04


@pytest.mark.slow
def test_two_ranks_measure_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, found = tmp_path / "tiny.csv", tmp_path / "found.json"
    model.write_text(TABLE)
    words = ["--model", str(model), "--compute-ms", str(1000 * COMPUTE_SECONDS), "--repeat", "3", "--limit", "60"]
    status = step.main(
        [*words, "--ranks", "2", "--optimizer", "sgd", "--methods", *METHODS, *UNDER_DDP, "--json", str(found)]
    )
    said = capsys.readouterr()
    assert status == 0, said.err

    first, *records = map(json.loads, found.read_text().splitlines())
    assert first["bench"] == "step" and first["machine"]["cores"]
    measured = {record["name"]: record for record in records if "median_seconds" in record}
    ours = "marsit schedule=layerwise full_precision_every=0"
    assert list(measured) == ["headroom", "horovod fp32", "none", ours, *UNDER_DDP]
    for record in measured.values():
        assert record["wrong"] == 0 and len(record["seconds"]) == len(record["alone_seconds"]) == 3
        assert record["parameters"] == 429_772 and record["tensors"] == 5
        # A calibrated step takes the compute time; other tests may keep the cores busy.
        assert 0.9 * COMPUTE_SECONDS < record["median_seconds"] < 20 * COMPUTE_SECONDS
        assert record["t1_seconds"] == measured["headroom"]["median_seconds"]
    half, low_rank = (measured[name]["bytes_sent"] for name in ("ddp fp16", "ddp powersgd r1"))
    assert 2 * half == measured["ddp fp32"]["bytes_sent"] and 0 < low_rank < half
    dense, marsit = measured["none"], measured[ours]
    assert marsit["buckets"] == 5 and marsit["median_exchange_seconds"] > 0
    assert 20 * marsit["bytes_sent"] < dense["bytes_sent"] and dense["bytes_sent"] > 4 * 429_772
    computed = [record["name"] for record in records if "computed_seconds" in record]
    assert computed == [f"marsit schedule=layerwise K={k}" for k in (50, 100)]
    assert "T1 measured" in said.out and "steps of SGD" in said.out
