"""A rank that is lost in the middle of a save: the others are told in time, and the folder holds a whole checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_compress.engine.saved import state_folder
from tests.support.marks import slow
from tests.support.nursery import Nursery, Rank

WORLD = 3
TIMEOUT, LIMIT, SLACK = 3.0, 4, 30.0
#: What harm comes to: a rank's own file, or the manifest, which rank 0 writes.
PLACES = {
    "before its file": {"where": "write", "before": True, "victim": 1},
    "after its file": {"where": "write", "before": False, "victim": 1},
    "before the manifest": {"where": "commit", "before": True, "victim": 0},
    "after the manifest": {"where": "commit", "before": False, "victim": 0},
}
CASES = [(fault, place) for fault in ("kill", "stop", "raise") for place in PLACES]
QUICK = ("kill", "before the manifest")


def _run(nursery: Nursery, folder: Path, fault: str, place: str) -> list[Rank]:
    case = {"fault": fault, "timeout": TIMEOUT, "folder": str(folder)} | PLACES[place]
    victims = [PLACES[place]["victim"]] if fault in ("kill", "stop") else []
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT)}
    return nursery.run(WORLD, "save.py", case, victims=victims, bound=100.0, env=env)  # type: ignore[arg-type]


def _whole(folder: Path) -> int:
    """Return the step of the checkpoint, all of whose files are intact."""
    manifest = state_folder.manifest(folder)
    steps = {state_folder.read(folder, entry)["step"] for entry in manifest.files}
    assert len(manifest.files) == WORLD and steps == {manifest.step}
    return manifest.step


@pytest.mark.parametrize(("fault", "place"), [QUICK, *slow(*(case for case in CASES if case != QUICK))])
def test_a_rank_that_is_harmed_in_a_save(nursery: Nursery, tmp_path: Path, fault: str, place: str) -> None:
    ranks, victim = _run(nursery, tmp_path, fault, place), PLACES[place]["victim"]
    assert "fault" in ranks[int(victim)].marks, ranks[int(victim)].output
    at = float(ranks[int(victim)].marks["fault"])
    for rank in ranks:
        if rank.number == victim and fault != "raise":
            continue
        assert rank.report, rank.output
        assert rank.report["error"] == ("ConfigError" if fault == "raise" else "ExchangeError"), rank.report
        assert rank.report["at"] - at < 2 * TIMEOUT + LIMIT + SLACK, rank.report
        if fault == "raise":
            assert f"rank {victim}: RuntimeError: this rank's own error" in rank.report["text"], rank.report
    # The new one only where its manifest was there before the harm came.
    assert _whole(tmp_path) == (2 if place == "after the manifest" else 1)


def test_control(nursery: Nursery, tmp_path: Path) -> None:
    for rank in _run(nursery, tmp_path, "none", "after its file"):
        assert rank.report and rank.report["error"] is None, rank
    assert _whole(tmp_path) == 2
