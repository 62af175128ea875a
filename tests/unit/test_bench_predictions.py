"""Predictions against measurements: the fit finds what was put in, and cells that were not fitted to are told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("horovod.torch")

from benchmarks import predictions
from benchmarks.results import Record, append_json, header


def points(pace: float, message: float) -> list[Record]:
    """Return what would be measured if the model were right with these two numbers."""
    found = []
    for ranks, rate in ((2, "1gbit"), (3, "200mbit")):
        for schedule in ("size:25MB", "layerwise"):
            name = f"topk density=0.01 schedule={schedule}"
            one = {"bench": "predictions", "name": name, "model": "mlp", "ranks": ranks, "rate": rate}
            one |= {"t1_seconds": 0.03, "median_alone_seconds": 0.1, "wrong": 0}
            seconds = predictions.Method("topk", [], 1e-4).predict(one, pace, message)
            found.append(one | {"median_seconds": seconds, "q1_seconds": seconds, "q3_seconds": seconds})
    return found


@pytest.mark.slow
def test_the_fit_finds_what_was_put_in_and_predicts_the_other_cells() -> None:
    pace, message = predictions.PACES[12], predictions.MESSAGES[10]
    found = predictions.compared(points(pace, message), [(2, "1gbit")], 1e-4)
    assert [(one["ranks"], one["fitted"]) for one in found] == [(2, True), (2, True), (3, False), (3, False)]
    assert all(abs(one["predicted_error"]) < 0.02 for one in found)
    assert all(one["model_error"] < -0.05 for one in found)
    assert "error of 2 steps that were not fitted to" in predictions.text(found)


@pytest.mark.slow
def test_records_are_shown_again_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    found = predictions.compared(points(2.0, 1e-4), [(2, "1gbit")], 1e-4)
    append_json(tmp_path / "all.json", [header("predictions", []), *found])
    assert predictions.main(["--from", str(tmp_path / "all.json"), "--plot", str(tmp_path)]) == 0
    assert "200mbit" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("predictions-*")} == {"predictions-mlp.png", "predictions-mlp.svg"}
