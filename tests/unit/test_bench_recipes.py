"""The benchmark of recipes does what its file lacks, keeps failures, and makes tables of what there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from benchmarks import recipes
from benchmarks.figures_recipes import markdown

SETTINGS = {"said": "words", "metric": "loss", "steps": 3, "lr": 0.1}


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[recipes.Run]:
    """Stand in for the trainings, and list those that were asked for."""
    done: list[recipes.Run] = []

    def train(run: recipes.Run, chosen: Any) -> dict[str, Any]:
        done.append(run)
        if run.method == "broken":
            return {"failed": "ValueError: a | b", "loss": None, "seconds": 1.0}
        loss = 2.0 + 0.1 * (run.method == "marsit") + run.seed
        accuracy = 0.8 - 0.004 * (run.method == "marsit")
        return {"loss": loss, "accuracy": accuracy, "bytes_sent": 10, "bytes_dense": 100, "seconds": 1.0}

    monkeypatch.setattr(recipes, "train", train)
    monkeypatch.setattr(
        recipes,
        "settings",
        lambda quick: {"a": {"task": "a"} | SETTINGS, "b": {"task": "b"} | SETTINGS | {"metric": "accuracy"}},
    )
    return done


def run(path: Path, *given: str) -> int:
    return recipes.main(["--json", str(path), *given])


def test_what_the_file_has_is_not_done_again(tmp_path: Path, trainings) -> None:
    path = tmp_path / "new" / "recipes.jsonl"
    assert run(path, "--only", "a", "--methods", "none,topk", "--seeds", "1,2") == 0
    assert trainings == [("a", "none", 1), ("a", "none", 2), ("a", "topk", 1)]
    assert run(path, "--methods", "none,topk,marsit", "--seeds", "1,2") == 0
    assert trainings[3:] == [
        ("b", "none", 1), ("b", "none", 2), ("b", "topk", 1),
        ("a", "marsit", 1), ("a", "marsit", 2), ("b", "marsit", 1), ("b", "marsit", 2),
    ]  # fmt: skip
    size = path.stat().st_size
    assert run(path, "--methods", "none") == 0 and len(trainings) == 12  # the third seed
    assert run(path, "--methods", "none") == 0 and len(trainings) == 12
    assert path.stat().st_size > size


def test_a_line_that_was_cut_off_is_done_again(tmp_path: Path, trainings) -> None:
    path = tmp_path / "recipes.jsonl"
    run(path, "--only", "a", "--methods", "none")
    path.write_text(path.read_text()[:-20])
    for _ in range(2):
        run(path, "--only", "a", "--methods", "none")
    assert trainings[3:] == [("a", "none", 3)]
    assert [record["seed"] for record in recipes.read(path)] == [1, 2, 3]
    headers = [
        line for line in path.read_text().splitlines() if line.startswith('{"bench": "recipes", "name": "header"')
    ]
    assert len(headers) == 2 and all(map(json.loads, headers))


def test_another_rate_is_another_training_and_other_words_are_not(tmp_path: Path, trainings, monkeypatch) -> None:
    path = tmp_path / "recipes.jsonl"
    run(path, "--only", "a", "--methods", "none,marsit")
    monkeypatch.setattr(recipes, "settings", lambda quick: {"a": {"task": "a"} | SETTINGS | {"said": "others"}})
    run(path, "--only", "a", "--methods", "none")
    assert len(trainings) == 6
    monkeypatch.setattr(recipes, "settings", lambda quick: {"a": {"task": "a"} | SETTINGS | {"lr": 0.2}})
    run(path, "--only", "a", "--methods", "none")
    assert len(trainings) == 9
    assert markdown(recipes.read(path)).splitlines()[2].endswith("| - |"), "marsit had the former rate"


def test_the_tables(tmp_path: Path, trainings, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipes.jsonl"
    run(path, "--methods", "none,marsit,topk")
    capsys.readouterr()
    assert run(path, "--table") == 0
    assert (
        capsys.readouterr().out
        == """\
| task | measure | `none` | `marsit` | `topk` |
| --- | --- | --- | --- | --- |
| a | loss | 4.0000 (3.0000 to 5.0000) | **-2.5 %** (-3.3, -2.5, -2.0) | +0.0 % |
| b | accuracy | 0.8000 (0.8000 to 0.8000) | -0.5 % (-0.5, -0.5, -0.5) | +0.0 % |

- `marsit`: at most 1 % worse than `none` in 1 of 2 tasks
- `topk`: at most 1 % worse than `none` in 2 of 2 tasks

| task | `marsit` | `topk` |
| --- | --- | --- |
| a | 10.0 | 10.0 |
| b | 10.0 | 10.0 |
"""
    )


def test_the_page_shows_what_the_file_holds() -> None:
    page = (recipes.ROOT / "docs" / "recipes.md").read_text()
    shown = page.partition("<!-- measured: python -m benchmarks.recipes --table -->\n\n")[2]
    shown = shown.partition("\n\n<!-- end of measured -->")[0]
    records = recipes.read(recipes.FILE)
    methods = {record["name"] for record in records} - {"none"}
    assert shown == (markdown(records) if methods else "Not measured yet.")


@pytest.mark.slow
def test_real_trainings_and_one_that_cannot_be(tmp_path: Path) -> None:
    path = tmp_path / "recipes.jsonl"
    words = ["--quick", "--only", "tabular", "--methods", "none,nonsense", "--seeds", "1"]
    assert run(path, *words) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["header", "none", "nonsense"]
    assert lines[1]["loss"] > 0 and lines[1]["recipe"]["quick"] and lines[1]["bench"] == "recipes"
    assert "nonsense" in lines[2]["failed"]
