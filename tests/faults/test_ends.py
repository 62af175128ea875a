"""Ranks that fall silent, fail or are interrupted, and programs that just end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.marks import slow
from tests.support.nursery import Nursery, Rank

from .survivors import DDP, PATHS, WORLD, blames


def _fault_at(ranks: list[Rank], victim: int) -> float:
    return float(ranks[victim].marks["fault"])


@pytest.mark.parametrize("path", ["attached", *slow("stock", DDP)])
def test_silent_rank(nursery: Nursery, path: str) -> None:
    """A rank that is alive but does not step: Horovod would wait for it for ever."""
    case = {"fault": "sleep", "victim": 1, "path": path, "timeout": 2.0, "sleep": 6.0}
    ranks = nursery.run(WORLD, "train.py", case)
    for rank in ranks:
        first = rank.report["first"]
        assert rank.status == 0, rank
        assert "HorovodInternalError" in first["kinds"], first
        delay = first["at"] - _fault_at(ranks, 1)
        if rank.number == 1:
            assert 6.0 <= delay <= 8.0  # it finds out when it comes back
            continue
        assert 1.0 <= delay <= 4.0, delay
        assert path == "stock" or blames(first["text"], 1), first
    if path == "stock":  # Horovod's own error does not know the reason: the rank that ends the wait logs it
        assert any(blames(rank.output, 1) for rank in ranks), ranks


@pytest.mark.slow
@pytest.mark.parametrize("path", ["attached", DDP])
def test_late_but_in_time(nursery: Nursery, path: str) -> None:
    """The control of the test above."""
    case = {"fault": "sleep", "victim": 1, "path": path, "timeout": 10.0, "sleep": 2.0, "leave": True}
    for rank in nursery.run(WORLD, "train.py", case):
        assert (rank.report["first"]["error"], rank.report["steps"]) == (None, 4)


@pytest.mark.parametrize("path", ["stock", *slow("attached", DDP)])
def test_corrupt_frame(nursery: Nursery, path: str) -> None:
    """Rank 1 sends 12 frames a step; its step, which it sends aside before, is not counted.

    The tenth of these is the hop from reducing to gathering of bucket 1.
    """
    case = {"fault": "flip", "victim": 1, "hop": 9, "path": path, "timeout": 20.0, "leave": True}
    for rank in nursery.run(WORLD, "train.py", case):
        first = rank.report["first"]
        assert rank.report["steps"] == 0
        assert first["error"] == ("CorruptFrameError" if rank.number == 2 else "ExchangeError")
        assert "corrupt frame from rank 1 (step 0, bucket 1, hop 3, chunk 2, segment 0): checksum" in first["text"]
        assert rank.number == 2 or "Rank 2 stopped first" in first["text"]
        assert first["seconds"] < 5.0


@pytest.mark.slow
@pytest.mark.parametrize("path", ["attached", DDP])
def test_dump(nursery: Nursery, tmp_path: Path, path: str) -> None:
    env = {"HVC_DUMP_DIR": str(tmp_path / "made" / "here")}
    case = {"fault": "kill", "victim": 3, "event": "hop", "hop": 0, "path": path, "leave": True}
    ranks = nursery.run(WORLD, "train.py", case, victims=[3], env=env)
    folder = tmp_path / "made" / "here"
    assert sorted(path.name for path in folder.iterdir()) == ["rank0.json", "rank1.json", "rank2.json"]
    for rank in ranks[:3]:
        document = json.loads((folder / f"rank{rank.number}.json").read_text())
        assert document["failure"] == rank.report["first"]["text"]
        assert document["rank"] == rank.number
        assert document["run"] == json.loads((folder / "rank0.json").read_text())["run"] != ""
        assert 10 < len(document["events"]) <= 256
        assert document["events"][-1]["step"] == 2
        assert set(document["events"][0]) == {"time", "step", "bucket", "event", "hop"}
        assert (folder / f"rank{rank.number}.json").stat().st_size < 40_000


@pytest.mark.slow
@pytest.mark.parametrize("path", ["attached", DDP])
def test_users_own_error(nursery: Nursery, path: str) -> None:
    case = {"fault": "raise", "victim": 1, "path": path, "catch": False, "timeout": 30.0}
    ranks = nursery.run(WORLD, "train.py", case)
    at = _fault_at(ranks, 1)
    for rank in ranks:
        assert rank.status == 1
        assert rank.seconds < 25.0 and at > 0  # no rank has waited for its timeout
        assert "Fatal Python error" not in rank.output and "terminate called" not in rank.output
        last = "RuntimeError: this rank's own error" if rank.number == 1 else "horovod_compress.errors.ExchangeError"
        assert last in rank.output
        assert rank.number == 1 or "rank 1" in rank.output.splitlines()[-1] or blames(rank.output, 1)


ENDS = {
    "raise": (1, "ended because of RuntimeError: this rank's own error"),
    "exit": (5, "came to the end of its program, or called sys.exit()"),
}


@pytest.mark.parametrize(
    ("fault", "path"), [("exit", DDP), ("raise", "attached"), *slow(("raise", DDP), ("exit", "attached"))]
)
def test_a_rank_that_leaves_says_why(nursery: Nursery, fault: str, path: str) -> None:
    """Between two steps; its own traceback and status are as ever."""
    status, why = ENDS[fault]
    case = {"fault": fault, "victim": 1, "path": path, "catch": False, "timeout": 30.0}
    for rank in nursery.run(WORLD, "train.py", case):
        if rank.number == 1:
            assert rank.status == status and ("this rank's own error" in rank.output) == (fault == "raise")
        else:
            assert rank.status == 1 and f"Rank 1 stopped first: {why}." in rank.output, rank.output


@pytest.mark.parametrize(
    ("meeting", "told"),
    [("handshake", "the handshake"), *slow(("attach", "the comparison of ranks before the first gradient"))],
)
def test_error_before_a_meeting(nursery: Nursery, meeting: str, told: str) -> None:
    """A rank that ends is missed at once, and by name; what it was awaited for is said in a user's words."""
    for rank in nursery.run(3, "absent.py", {"victim": 1, "meeting": meeting, "timeout": 60.0}):
        if rank.number != 1:
            assert rank.report["error"] == "ExchangeError" and rank.report["seconds"] < 20.0
            text = rank.report["text"]
            missed = f"{told} did not take place. Rank(s) 1 never came: look at their output. Usual causes: "
            assert text.startswith(f"rank {rank.number}: {missed}"), text
            advice, _, horovod = text.partition(" Horovod has ended, and says: ")
            assert advice.endswith("in the same order on every rank.") and horovod and ".." not in text


@pytest.mark.slow
def test_no_error_before_a_meeting(nursery: Nursery) -> None:
    """The control of the test above."""
    for rank in nursery.run(3, "absent.py", {"victim": None, "meeting": None, "timeout": 60.0}):
        assert (rank.status, rank.report) == (0, {"error": None}), rank


@pytest.mark.parametrize("path", slow(*PATHS, DDP))
def test_interrupt_in_an_exchange(nursery: Nursery, path: str) -> None:
    """Ctrl-C while rank 3 is awaited: the rank ends at once, although its exchange has much time."""
    case = {
        "fault": "interrupt", "victim": 1, "event": "encode", "bucket": 0, "sleeper": 3, "sleep": 4.0,
        "catch": False, "timeout": 30.0, "path": path,
    }  # fmt: skip
    ranks = nursery.run(WORLD, "train.py", case, bound=30.0)
    assert ranks[1].status not in (0, None), ranks[1]
    assert "KeyboardInterrupt" in ranks[1].output
    assert ranks[1].seconds < 25.0
    for rank in ranks:
        assert rank.status is not None, f"rank {rank.number} did not end: {rank.output}"
        assert "Fatal Python error" not in rank.output and "terminate called" not in rank.output


@pytest.mark.parametrize("path", slow(*PATHS, DDP))
def test_end_without_close(nursery: Nursery, path: str) -> None:
    case = {"catch": False, "path": path}
    ranks = nursery.run(WORLD, "train.py", case)
    for rank in ranks:
        assert (rank.status, rank.output) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["attached", DDP])
def test_end_after_a_failure(nursery: Nursery, path: str) -> None:
    """Rank 0 freezes, and with it the store; neither close() nor the interpreter's end hangs on it."""
    case = {"fault": "stop", "victim": 0, "event": "hop", "hop": 1, "path": path, "timeout": 3.0, "close": False}
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "3"}  # Horovod itself waits for this long when it ends
    ranks = nursery.run(WORLD, "train.py", case, victims=[0], bound=35.0, env=env)
    for rank in ranks[1:]:
        assert rank.report["first"]["error"], rank.report
        assert rank.status == 0, rank
        assert "Fatal Python error" not in rank.output and "terminate called" not in rank.output
    assert max(rank.seconds for rank in ranks[1:]) < 25.0


@pytest.mark.slow
@pytest.mark.parametrize("owned", [True, pytest.param(False, marks=pytest.mark.skipif(
    torch.__version__ < (2, 10), reason="only PyTorch from 2.10 on takes Python's lock there"))])  # fmt: skip
def test_tokens_at_horovod_s_end(nursery: Nursery, owned: bool) -> None:
    """Tokens without an owner in C++, the control, let Horovod's thread and this one wait for each other for ever."""
    first = nursery.run(2, "tokens.py", {"owned": owned}, bound=12.0 if owned else 4.0)[0]
    if owned:
        assert first.report and first.report["ended"] and first.report["count"] > 100, first
    else:
        assert (first.status, first.report) == (None, None), first
        assert "in _allreduce_async" in first.output, first.output
