"""What a table of learning quality keeps, so that it can be measured piece by piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Stand in for the trainings, and list those that were asked for."""
    done: list[tuple[str, int]] = []

    def train(words: list[str], seed: int, chosen: Any) -> dict[str, Any]:
        done.append((" ".join(words), seed))
        found = {"final": 0.9, "metric": "accuracy", "optimizer": "sgd", "lr": 0.02}
        return found | {"bytes_ratio": 1.0, "ranks_identical": True}

    monkeypatch.setattr(quality, "train", train)
    return done


def run(monkeypatch: pytest.MonkeyPatch, *given: str) -> None:
    monkeypatch.setattr("sys.argv", ["quality.py", "--json", *given])
    quality.main()


def test_what_is_kept_is_not_measured_again(monkeypatch, tmp_path: Path, trainings, capsys) -> None:
    keep = ["--keep", str(tmp_path / "new" / "kept.jsonl")]
    run(monkeypatch, "--seeds", "1,2", "--run", "none", *keep)
    run(monkeypatch, "--seeds", "1,3", "--run", "none", "--run", "marsit", *keep)
    assert trainings == [("none", 1), ("none", 2), ("none", 3), ("marsit", 1), ("marsit", 3)]
    run(monkeypatch, "--seeds", "1", "--run", "none", "--lr-schedule", "cosine", *keep)
    run(monkeypatch, "--seeds", "1", "--run", "none", "--beta2", "0.95", *keep)
    assert trainings[5:] == [("none", 1)] * 2
    assert [json.loads(line)["mean"] for line in capsys.readouterr().out.splitlines()] == [0.9] * 5


def test_a_line_that_was_cut_off_is_measured_again(monkeypatch, tmp_path: Path, trainings) -> None:
    path = tmp_path / "kept.jsonl"
    run(monkeypatch, "--seeds", "1,2", "--run", "none", "--keep", str(path))
    path.write_text(path.read_text()[:-20])
    for _ in range(2):
        run(monkeypatch, "--seeds", "1,2", "--run", "none", "--keep", str(path))
    assert trainings == [("none", 1), ("none", 2), ("none", 2)]


def test_a_file_of_before_later_options_still_counts(monkeypatch, tmp_path: Path, trainings) -> None:
    path = tmp_path / "kept.jsonl"
    given = ["--seeds", "1", "--run", "none", "--keep", str(path)]
    run(monkeypatch, *given)
    record = json.loads(path.read_text())
    assert record["asked"].pop("beta2") is None and record["asked"].pop("one_process") is False
    path.write_text(json.dumps(record) + "\n")
    run(monkeypatch, *given)
    assert trainings == [("none", 1)]
    run(monkeypatch, *given, "--beta2", "0.9")
    assert trainings == [("none", 1)] * 2


def test_all_ranks_may_train_in_one_process(monkeypatch, tmp_path: Path, capsys) -> None:
    given = ["--one-process", "--out", str(tmp_path), "--ranks", "2", "--steps", "2", "--seeds", "1"]
    with pytest.raises(SystemExit):
        run(monkeypatch, *given, "--run", "none")
    assert "--one-process needs --optimizer and --lr" in capsys.readouterr().err
    run(monkeypatch, *given, "--optimizer", "adam", "--lr", "1e-3", "--beta2", "0.9", "--run", "topk density=0.1")
    row = json.loads(capsys.readouterr().out)
    assert (row["name"], row["optimizer"], row["lr"], row["metric"]) == ("topk density=0.1", "adam", 1e-3, "accuracy")
    assert 0 <= row["mean"] <= 1 and float(row["bytes_ratio"].removesuffix("x")) > 1
    [log] = tmp_path.glob("*-topk-density=0.1-1.log")
    assert '"beta2": 0.9' in log.read_text()


def test_a_training_that_diverges_is_not_the_best(monkeypatch, tmp_path: Path, capsys) -> None:
    given = ["--one-process", "--out", str(tmp_path), "--ranks", "2", "--steps", "4", "--seeds", "1", "--run", "none"]
    run(monkeypatch, *given, "--optimizer", "sgd", "--lr", "1e30")
    assert json.loads(capsys.readouterr().out)["mean"] < 0.3
