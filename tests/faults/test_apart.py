"""A rank that saves alone is told so, and so are the others: each waits for something that cannot come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.marks import each_value
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
    fronts = ["torch" if path == "ddp" else "horovod"]
    return nursery.run(2, "apart.py", case, bound=60.0, patience=5.0, fronts=fronts)


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
def test_control_a_rank_that_comes_late(nursery: Nursery, tmp_path: Path, path: str) -> None:
    for rank in run(nursery, tmp_path, path, "late"):
        assert rank.report["error"] is None, rank
