"""Saves and loads that one rank has given up when another one comes to them, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import run_ranks


@pytest.mark.slow
def test_what_was_given_up_is_no_answer_to_what_comes_behind_it(tmp_path: Path) -> None:
    first, second = run_ranks(2, "late.py", timeout=100, arguments={"folder": str(tmp_path)}, front="torch").reports
    late = "ExchangeError: rank"
    assert first["retried"]["given up"].startswith(late) and first["loaded"]["given up"].startswith(late)
    assert second["of another"]["given up"].startswith(late)
    for report in (first, second):
        assert "different rounds of the saving of a checkpoint folder" in report["retried"]["apart"]
        assert report["retried"]["again"] == "accepted"
        assert report["loaded"]["same"] and report["loaded"]["control"]
        assert report["of another"]["own"] and report["of another"]["control"]
    assert second["loaded"]["late"].startswith(late)
