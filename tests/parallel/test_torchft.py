"""Replicas of the real torchft: what waits when a step is discarded, and when one of them dies, fails or joins.

`pip install torchft` into an environment that has torch; without it, this is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import JOBS, ROOT, kill_marked
from tests.support.nursery import MARK, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SECONDS = 180.0

Notes = dict[int, list[dict[str, Any]]]


def run(folder: Path, **case: Any) -> tuple[Notes, dict[int, str]]:
    """Return what each replica has noted of its steps, and the weights that it ended with."""
    pytest.importorskip("torchft", reason="torchft is not installed")
    folder.mkdir(exist_ok=True)
    mark = uuid.uuid4().hex
    asked = {"HVC_TEST_ARGUMENTS": json.dumps({"begin": 2, "steps": 6, "method": "topk"} | case)}
    environment = os.environ | settings() | asked | {MARK: mark, "HVC_TEST_FOLDER": str(folder), "RUST_LOG": "error"}
    try:
        job = subprocess.run(
            [sys.executable, str(JOBS / "replicas.py")], env=environment, cwd=ROOT, timeout=SECONDS, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
    finally:
        kill_marked(mark)
    lines = {int(path.suffix[1:]): path.read_text().splitlines() for path in folder.glob("notes.*")}
    notes = {number: list(map(json.loads, found)) for number, found in lines.items()}
    ends = {int(path.suffix[1:]): path.read_text() for path in folder.glob("end.*")}
    assert notes and ends, job.stdout[-4000:]
    assert len(set(ends.values())) == 1, (ends, job.stdout[-4000:])
    return notes, ends


def check_kept(notes: list[dict[str, Any]], *, heals: bool = False) -> None:
    """What waits goes on from step to step, with the share that it has among so many; nothing does that of others."""
    for now, then in pairwise(notes):
        if now.get("after") and then.get("before"):
            assert then["before"] == now["carried"][str(then["world"])] or (heals and not now["committed"]), (now, then)
    for note in (note for note in notes if "after" in note):
        assert "residual" not in note["shown"], note
        assert note["after"] == (note["exchanged"] if note["committed"] else note["before"]), note
        assert note["exchanged"] != note["before"], "the control: the exchange has changed it"


@pytest.mark.parametrize("more", [{}, {"method": "marsit", "adam": True}], ids=["topk", "marsit"])
def test_a_step_that_is_discarded_leaves_what_waits_as_it_was(tmp_path: Path, more: dict[str, Any]) -> None:
    fails = {"0": {"3": "fails"}, "1": {"3": "fails"}}
    notes, ends = run(tmp_path / "fails", **more, **fails)
    for mine in notes.values():
        assert [note["step"] for note in mine] == [0, 1, 2, 3, 3, 4, 5]
        assert [note["committed"] for note in mine] == [True] * 3 + [False] + [True] * 3
        if not more:
            check_kept(mine)
        first, again = (note for note in mine if note["step"] == 3)
        assert first["before"] == first["after"] == again["before"] and first["exchanged"] == again["exchanged"]
    assert run(tmp_path / "control", **more)[1] == ends, "the step was made as if there had been none before"


def test_a_replica_that_joins_has_nothing_that_waits_and_gets_none(tmp_path: Path) -> None:
    notes, ends = run(tmp_path, join=2, steps=8)
    assert ends.keys() == {0, 1, 2}
    assert notes[2][0]["step"] > 2 and notes[2][0]["before"] == notes[2][0]["nothing"]
    for mine in notes.values():
        check_kept(mine)
        assert mine[-1]["after"] != mine[-1]["nothing"]
    assert {note["world"] for note in notes[0]} == {2, 3}


def test_a_replica_that_dies_in_a_step_leaves_the_others_what_they_have(tmp_path: Path) -> None:
    notes, ends = run(tmp_path, begin=3, **{"1": {"3": "dies"}})
    assert ends.keys() == {0, 2}
    for number in ends:
        check_kept(notes[number])
        worlds = {note["step"]: note["world"] for note in notes[number] if note["committed"]}
        assert [worlds[step] for step in range(6)] == [3, 3, 3, 2, 2, 2]
        last, first = (next(n for n in notes[number] if n["step"] == step and n["committed"]) for step in (2, 3))
        assert first["before"] == last["carried"]["2"] != last["after"]


def test_a_replica_that_misses_a_step_heals_and_begins_with_nothing(tmp_path: Path) -> None:
    notes, _ = run(tmp_path, least=1, **{"1": {"3": "fails"}})
    check_kept(notes[0])
    check_kept(notes[1], heals=True)
    missed = next(note for note in notes[1] if not note["committed"])
    after = notes[1][notes[1].index(missed) + 1]
    assert missed["before"] == missed["after"] != missed["nothing"]
    assert after["step"] == 4 and after["before"] == after["nothing"]
