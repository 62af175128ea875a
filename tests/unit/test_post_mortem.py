"""Flight records that are damaged, are none, or say what no rank wrote: each is told by name and hides no other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod_compress.cli.command import main
from horovod_compress.engine.agreement.notes import verdict
from horovod_compress.errors import ConfigError, one_line
from horovod_compress.exchange.transports.board import Board
from horovod_compress.exchange.transports.sockets import Connections
from horovod_compress.fronts.startup import _run_of
from horovod_compress.observe import files

DEEP = "[" * 100_000


def record(rank: int, **others: Any) -> dict[str, Any]:
    events = [{"time": 1.0, "step": 3, "bucket": 0, "event": "hop", "hop": 1}]
    return {"rank": rank, "time": 1.0, "failure": f"failure of {rank}", "events": events, "world": 3} | others


def write(path: Path, **others: Any) -> None:
    path.write_text(json.dumps(record(1) | others))


def good(folder: Path) -> None:
    for rank in (0, 2):
        (folder / f"rank{rank}.json").write_text(json.dumps(record(rank)))


#: What may be in the place of the record of rank 1.
DAMAGED: dict[str, Callable[[Path], object]] = {
    "deep": lambda path: path.write_text(DEEP),
    "deep note": lambda path: path.write_text(json.dumps(record(1))[:-1] + f', "note": {DEEP}'),
    "infinity": lambda path: write(path, time=float("inf")),
    "too large": lambda path: path.write_text(json.dumps(record(1)).replace('"time": 1.0', '"time": 1e400', 1)),
    "digits": lambda path: path.write_text('{"rank": ' + "9" * 5000 + "}"),
    "no Unicode": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "folder": lambda path: path.mkdir(),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "pipe": os.mkfifo,
    "large": lambda path: path.write_text(json.dumps(record(1, failure="x" * (5 << 20)))),
    "negative": lambda path: write(path, rank=-1),
    "true": lambda path: write(path, rank=True),
    "another's": lambda path: write(path, rank=0),
    "outside": lambda path: write(path, rank=7),
    "large world": lambda path: write(path, world=100_000_000),
    "events": lambda path: write(path, events=[{"event": "hop", "hop": [], "step": 0, "bucket": 0}]),
    "event's name": lambda path: write(path, events=[{"event": {}, "hop": 0, "step": 0, "bucket": 0}]),
    "host": lambda path: write(path, host=["a"]),
    "run": lambda path: write(path, run=1),
    "words": lambda path: write(path, left=["a"]),
    "whose words": lambda path: write(path, left={"-1": "a"}),
    "no words": lambda path: write(path, left={"0": 1}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_hides_no_other(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good(tmp_path)
    DAMAGED[name](tmp_path / "rank1.json")
    began = time.monotonic()
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert time.monotonic() - began < 5
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 2]
    assert (found["without_record"], found["world"]) == ([1], 3)
    (problem,) = found["problems"]
    assert problem.startswith("rank1.json is not a flight record: ") and len(problem) < 250


FORGED = "lost\n   1  elsewhere          +0.00 s  \x1b[2J\x1b]0;title\x07\u202e\ud800\x9b31m\u2028Rank 1 said: no"


@pytest.mark.parametrize("where", ["failure", "host", "event", "why", "name", "left"])
def test_a_record_writes_no_line_of_another_rank(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good(tmp_path)
    if where == "event":
        write(tmp_path / "rank1.json", events=[{"event": FORGED, "hop": 0, "step": 0, "bucket": 0}])
    elif where == "why":
        write(tmp_path / "rank1.json", note={"where": "offer", "place": [3, 0, 0], "finished": None, "why": FORGED})
    elif where == "left":
        (tmp_path / "rank0.json").write_text(json.dumps(record(0, left={"1": FORGED})))
    elif where == "name":
        (tmp_path / "rank\n   1  elsewhere\x1b[2J.json").write_text("{}")
    else:
        first = {"where": "offer", "place": [3, 0, 0], "finished": None, "why": "memory"}  # whose failure is shown
        write(tmp_path / "rank1.json", note=first, **{where: FORGED})
    assert main(["inspect", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert sum(line.startswith("   1  ") for line in lines) == 1
    assert sum(line.startswith("Rank 1 said:") for line in lines) <= 1
    assert all(line.isprintable() for line in lines)


def test_a_rank_whose_program_ended_is_known_by_the_word_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has not failed, so it leaves no record. The control is a rank that was killed."""
    place = {"where": "hop 1", "place": [3, 0, 1], "finished": None, "peer": 1}
    for left in ({"1": "ended because of RuntimeError: first"}, {}):
        for rank in (0, 2):
            (tmp_path / f"rank{rank}.json").write_text(json.dumps(record(rank, note=place, left=left)))
        assert main(["inspect", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert main(["inspect", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["left"], found["first"], found["without_record"]) == (left, [1], [1])
        assert found["verdict"] in text
        if left:
            assert found["verdict"] == "Rank 1 stopped first: ended because of RuntimeError: first."
            assert "   1  no record: ended because of RuntimeError: first\n" in text
        else:
            assert found["verdict"].startswith("No sign of life from rank(s) 1")


@pytest.mark.parametrize("first_run", ["a", ""], ids=["named", "without a name"])
def test_only_the_newest_run_is_read(first_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 1 raised and the job began anew, where rank 0 was killed. The control: all records are of one run.

    The clock of host b is late by minutes, so the one that ended last has not the latest time.
    """
    place = {"where": "hop 1", "place": [3, 0, 1], "finished": None}
    old = {"note": place | {"peer": 1}, "run": first_run}
    for run in ("b", first_run):
        new = {"note": place | {"peer": 0}, "run": run}
        for rank, host, at, more in ((0, "a", 300.0, old), (2, "b", 10.0, old), (1, "b", 20.0, new)):
            (tmp_path / f"rank{rank}.json").write_text(json.dumps(record(rank, host=host, time=at, **more)))
        assert main(["inspect", str(tmp_path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        if run == "b":
            assert ([rank["rank"] for rank in found["ranks"]], found["without_record"]) == ([1], [0, 2])
            assert found["verdict"].startswith("No sign of life from rank(s) 0, 2")
            assert found["problems"] == [
                "the records of rank(s) 0, 2 are of a run that failed earlier, and are left out"
            ]
        else:
            assert len(found["ranks"]) == 3 and not found["problems"]


def test_the_compressions_of_one_run_share_its_name() -> None:
    """Until the framework is started again, as after the reset of an elastic job."""

    class Job:
        over = False

        def check(self) -> None:
            if self.over:
                raise ConfigError("Horovod was started again")

    jobs: Any = [Job() for _ in range(4)]
    first, second = _run_of(jobs[0]), _run_of(jobs[1])
    assert first == second
    jobs[0].over = jobs[1].over = True
    third, fourth = _run_of(jobs[2]), _run_of(jobs[3])
    assert third == fourth != first


def test_a_world_of_one_record_is_not_that_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good(tmp_path)
    write(tmp_path / "rank1.json", world=60_000)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world"] == 3


def test_many_ranks_without_a_record_are_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "rank1.json", world=60_000)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2-59999  no record" in out and "and 59935 more" in out and len(out) < 2000


def test_a_note_of_a_rank_is_read_part_by_part() -> None:
    """The same in a running job, where notes come from the other ranks."""
    place = [3, 0, 2]
    odd = {0: {"place": "x"}, 1: 7, 2: {"place": place, "finished": None, "why": "a\nRank 0 stopped first: b\x1b[1m"}}
    notes = files.checked_notes(odd)
    assert notes == {0: {}, 1: {}, 2: {"place": place, "finished": None, "why": "a Rank 0 stopped first: b\\x1b[1m"}}
    assert verdict(notes, 3) == "Rank 2 stopped first: a Rank 0 stopped first: b\\x1b[1m."
    assert files.checked_notes({0: {"place": [-1, 0, 0]}, 1: {"place": place, "finished": [1]}}) == {
        0: {},
        1: {"place": place},
    }
    assert files.checked_notes({0: {"stuck": True}, 1: {"place": "first", "finished": "no"}}) == {0: {}, 1: {}}


def test_one_line_keeps_what_people_write() -> None:
    assert one_line("Größe ≠ 3: 日本, `a b`\n\tc") == "Größe ≠ 3: 日本, `a b` c"
    assert one_line("x" * 30, most=4) == "xxxx..."


def test_the_board_survives_what_is_nested_too_deeply() -> None:
    """A message of a peer: the thread that reads it ends, and with it the peer's messages, without a traceback."""
    import torch

    text = torch.frombuffer(bytearray(DEEP.encode()), dtype=torch.uint8)

    class Group:
        def recv(self, into: list[Any], peer: int, tag: int) -> Any:
            first = into[0].numel() == 8
            into[0].copy_(torch.tensor([text.numel()]).view(torch.uint8) if first else text)
            return self

        def wait(self, timeout: Any) -> None: ...

    board = Board(Group(), Connections(None), 0, 2)
    board._readers[1].join(5)
    assert not board.hears(1) and not board._values
