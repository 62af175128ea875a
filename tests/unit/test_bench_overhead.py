"""What the benchmark of the engine's own time makes of measurements, and that it runs with any checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import engine_overhead
from benchmarks.results import ROOT


def test_figures_are_differences_of_medians() -> None:
    found = {
        "base": [(100.0, 10.0), (900.0, 10.0), (100.0, 10.0)],
        "single": [(300.0, 30.0)] * 3,
        "layerwise": [(480.0, 30.0)] * 3,
    }
    assert engine_overhead.figures(found, 10) == {
        "gradient cpu": 20.0,
        "bucket cpu": 20.0,
        "gradient wall": 2.0,
        "bucket wall": 0.0,
    }


@pytest.mark.slow
def test_two_checkouts_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--params", "20", "--steps", "2", "--blocks", "3", "--pairs", "2", "--methods", "marsit"]
    file = tmp_path / "records.json"
    words = [*few, "--cases", "torch:1", "--against", str(ROOT), "--json", str(file)]
    assert engine_overhead.main(words) == 0
    assert "this / other, cpu" in capsys.readouterr().out
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["name"] for record in records] == ["header", *["overhead", "overhead", "ratio"]]
    assert all(len(record["gradient_cpu"]) == 2 for record in records[1:])


@pytest.mark.slow
def test_a_rank_that_fails_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_overhead.main(["--cases", "torch:1", "--methods", "no_such", "--pairs", "1", "--params", "2"]) == 1
    assert "unknown method 'no_such'" in capsys.readouterr().err
