"""The table of densities and delays: what is trained, what is kept, what is drawn."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality, tradeoff


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """Stand in for the jobs, and note which were started."""
    started: list[tuple[list[str], int]] = []

    def train(words: list[str], seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
        started.append((words, seed))
        return {"final": 0.9 + 0.01 * seed, "bytes_ratio": f"{10.0 * len(started)}x"}

    monkeypatch.setattr(quality, "train", train)
    return started


def _chosen(tmp_path: Path, *more: str) -> argparse.Namespace:
    given = ["--densities", "1,0.01", "--delays", "1,5", "--seeds", "1,2", "--keep", str(tmp_path / "kept.jsonl")]
    return tradeoff.arguments([*given, *more])


def test_every_density_is_trained_under_every_delay_once(tmp_path: Path, trained: list[tuple[list[str], int]]) -> None:
    chosen = _chosen(tmp_path)
    found = tradeoff.measured(chosen)
    assert list(found) == [(1.0, 1), (1.0, 5), (0.01, 1), (0.01, 5)] and len(trained) == 8
    assert trained[0] == (["none", "--update-mode", "--delay", "1"], 1)
    assert trained[-1] == (["sparse_binary", "density=0.01", "--update-mode", "--delay", "5"], 2)
    assert found[0.01, 5] == (pytest.approx(0.915), 70.0)
    assert tradeoff.measured(chosen) == found and len(trained) == 8  # from the file
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 8
    assert "| 0.01 | 0.9150 (50 x) | 0.9150 (70 x) |" in tradeoff.table(found, chosen)


def test_what_is_there_is_drawn_without_training(tmp_path: Path, trained: list[tuple[list[str], int]]) -> None:
    tradeoff.measured(_chosen(tmp_path, "--densities", "0.01"))
    lines = (tmp_path / "kept.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["asked"]["words"][0] == "sparse_binary"
    chosen = _chosen(tmp_path, "--draw-only")
    found = tradeoff.measured(chosen)
    assert list(found) == [(0.01, 1), (0.01, 5)] and len(trained) == 4
    tradeoff.draw(found, chosen, tmp_path / "tradeoff.png")
    assert (tmp_path / "tradeoff.png").stat().st_size > 10_000
