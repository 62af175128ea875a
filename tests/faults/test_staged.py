"""What becomes of a fault does not depend on where payloads are: they are exchanged from copies here."""

from __future__ import annotations

import pytest

from tests.support.nursery import Nursery

from .survivors import TIMEOUT, WORLD, blames, check_survivors, strike

pytestmark = pytest.mark.slow
SECONDS = 5.0


def test_control(nursery: Nursery) -> None:
    plain, staged = (nursery.run(WORLD, "train.py", {"fault": "none", "staged": staged}) for staged in (False, True))
    for rank, same in zip(staged, plain, strict=True):
        assert rank.report["first"]["error"] is None, rank.report
        assert (rank.status, rank.output, rank.report["steps"]) == (0, "", 4)
        assert rank.report["last"] == same.report["last"]


@pytest.mark.parametrize(
    ("phase", "victim", "method"),
    [("mid-ring", 2, "marsit"), ("in backward", 1, "marsit"), ("encode", 3, "sketch_fusion"), ("decode", 0, "marsit")],
)
def test_killed(nursery: Nursery, phase: str, victim: int, method: str) -> None:
    exchange = "ring" if method == "marsit" else "auto"
    survivors = strike(nursery, "kill", phase, victim, "attached", method=method, exchange=exchange, staged=True)
    check_survivors(survivors, victim, "attached", 0.0, SECONDS)


def test_frozen(nursery: Nursery) -> None:
    survivors = strike(nursery, "stop", "mid-ring", 1, "attached", staged=True)
    check_survivors(survivors, 1, "attached", 0.5 * TIMEOUT, TIMEOUT + SECONDS)


def test_corrupt_frame(nursery: Nursery) -> None:
    case = {"fault": "flip", "victim": 1, "hop": 9, "timeout": 20.0, "leave": True, "staged": True}
    for rank in nursery.run(WORLD, "train.py", case):
        first = rank.report["first"]
        assert first["error"] == ("CorruptFrameError" if rank.number == 2 else "ExchangeError")
        assert "corrupt frame from rank 1 (step 0, bucket 1, hop 3, chunk 2, segment 0): checksum" in first["text"]


def test_silent_rank(nursery: Nursery) -> None:
    case = {"fault": "sleep", "victim": 1, "timeout": 2.0, "sleep": 6.0, "staged": True}
    for rank in nursery.run(WORLD, "train.py", case):
        first = rank.report["first"]
        assert "HorovodInternalError" in first["kinds"], first
        assert rank.number == 1 or blames(first["text"], 1), first
