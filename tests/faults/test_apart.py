"""Ranks that come to different things, as when one saves alone, are told so: each waits for what cannot come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.marks import each_value, slow
from tests.support.nursery import Nursery, Rank

APART = 1.0
SAVES = "rank(s) 0 to the saving of a checkpoint folder"
STEPS = {
    "step": "rank(s) 1 to the exchange of step 3",
    "first step": "rank(s) 1 to the comparison of ranks before the first gradient",
    "other compression": "rank(s) 1 to the exchange of step 3",
}


def run(nursery: Nursery, folder: Path, path: str, kind: str) -> list[Rank]:
    case = {"path": path, "kind": kind, "apart": APART, "folder": str(folder)}
    fronts, world = ["torch" if path == "ddp" else "horovod"], 3 if "group" in kind else 2
    sets = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"}
    return nursery.run(world, "apart.py", case, bound=60.0, patience=5.0, fronts=fronts, env=sets)


@each_value
@pytest.mark.parametrize("path", ["horovod", "ddp"])
@pytest.mark.parametrize("kind", list(STEPS))
def test_one_rank_saves_and_another_one_steps(nursery: Nursery, tmp_path: Path, path: str, kind: str) -> None:
    ranks = run(nursery, tmp_path, path, kind)
    # The one that saves another compression hears that the first one has ended, or is ended by its launcher.
    for rank in ranks[1:] if kind == "other compression" else ranks:
        assert rank.report["error"] == "MismatchError", rank
        assert SAVES in rank.report["text"] and STEPS[kind] in rank.report["text"], rank


@each_value
@pytest.mark.parametrize("path", ["horovod", "ddp"])
def test_ranks_step_two_compressions_in_different_order(nursery: Nursery, tmp_path: Path, path: str) -> None:
    """The first one that is told so ends, and the other with it."""
    reports = [rank.report for rank in run(nursery, tmp_path, path, "other order") if rank.report]
    told = [report["text"] for report in reports if report["error"] == "MismatchError"]
    assert told and all(report["error"] for report in reports), reports
    for text in told:
        assert " to the exchange of step 3, rank(s) " in text or " to the exchange of step 3; " in text, text
        assert " to the exchange of step 3 of another compression" in text, text


@pytest.mark.slow
@pytest.mark.parametrize("path", ["horovod", "ddp"])
def test_ranks_of_a_group_are_told_by_what_they_are_in_the_job(nursery: Nursery, tmp_path: Path, path: str) -> None:
    _, *ranks = run(nursery, tmp_path, path, "group")
    for rank in ranks:
        assert rank.report["error"] == "MismatchError", rank
        assert "saving of a checkpoint folder among rank(s) 1, 2 of the job, rank(s) 1 to" in rank.report["text"], rank
        assert "in the job, rank 0 is rank 1, rank 1 is rank 2." in rank.report["text"], rank


@each_value
@pytest.mark.parametrize("path", ["horovod", "ddp"])
@pytest.mark.parametrize("kind", ["late", "late in a group", *slow("late beside", "late step of a group")])
def test_control_a_rank_that_comes_late(nursery: Nursery, tmp_path: Path, path: str, kind: str) -> None:
    """Also where one waits for it in a group, for which a third one waits, or on a thread that does not train."""
    for rank in run(nursery, tmp_path, path, kind):
        assert rank.report["error"] is None, rank
