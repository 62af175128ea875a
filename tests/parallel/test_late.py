"""What one rank has given up when another one comes to it, on real ranks: no answer to what comes behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import run_ranks

LATE, OK = "ExchangeError: rank", "accepted"


def run(front: str, world: int, folder: Path, *cases: str) -> list[dict[str, Any]]:
    given = {"folder": str(folder), "front": front, "cases": cases}
    launcher = "horovod" if front == "horovod" else "torch"
    return run_ranks(world, "late.py", timeout=200, arguments=given, front=launcher).reports


def test_a_save_that_was_given_up_is_no_answer_and_the_next_one_takes_place(tmp_path: Path) -> None:
    first, second = run("horovod", 2, tmp_path, "saved")
    for report in (first, second):
        assert report["saved"]["given up"].startswith(LATE) and report["saved"]["told"] == [OK] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("front", "world"), [("torch", 2), ("horovod", 2), ("fsdp", 4)])
def test_what_was_given_up_is_no_answer_and_the_next_call_of_all_takes_place(
    tmp_path: Path, front: str, world: int
) -> None:
    reports = run(front, world, tmp_path)
    for report in reports:
        assert report["saved"]["told"] == [OK] * 2
        assert report["loaded"]["same"] and report["loaded"]["control"] and report["loaded"]["again"]
        assert report["of_another"]["own"] and report["of_another"]["control"]
        assert report["started"]["told"] == [OK] * 3
        assert "begun" not in report or report["begun"]["told"] == [OK] * 4
        for told in report["ended"]["told"] if "ended" in report else ():
            assert told.startswith("ConfigError: rank ") and "torch.distributed was shut down" in told
    first, second = reports[:2]
    assert first["saved"]["given up"].startswith(LATE) and second["saved"]["given up"].startswith(LATE)
    assert first["loaded"]["given up"].startswith(LATE) and second["loaded"]["late"].startswith(LATE)
    assert second["of_another"]["given up"].startswith(LATE) and second["started"]["given up"].startswith(LATE)
    if front == "torch":
        assert second["started"]["unregistered"].startswith(LATE)
    if front != "fsdp":
        assert all(told.startswith(LATE) for told in second["begun"]["given up"])
