"""Two groups of one job that save into one folder: one of them is refused, and none loads what is the other's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import needs_front, run_ranks, values_of

WORLD = 4


@pytest.mark.parametrize("front", ["horovod", "torch"])
def test_groups_in_one_folder(front: str) -> None:
    needs_front(front)
    job = run_ranks(WORLD, "group_folders.py", timeout=120.0, front=front, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    job.values()
    apart: list[dict[str, Any]] = values_of(job.reports, "apart")  # the control
    assert all(mine["save"] == mine["load"] == mine["again"] == "" and mine["same"] for mine in apart)
    assert len({str(mine["kept"]) for mine in apart}) == WORLD, "residuals tell ranks and groups apart"

    found: list[dict[str, Any]] = values_of(job.reports, "one")
    [winner] = {number // 2 for number, mine in enumerate(found) if not mine["save"]}
    for number, mine in enumerate(found):
        assert mine["same"], "what was refused has changed nothing"
        if number // 2 == winner:
            assert mine["save"] == mine["load"] == mine["again"] == ""
            continue
        theirs, ours = ("0, 1", "2, 3") if winner == 0 else ("2, 3", "0, 1")
        whose = f"is of rank(s) {theirs}, and this compression is of rank(s) {ours}; "
        for text in (mine["save"], mine["again"]):
            assert text.startswith("ConfigError: rank ") and whose + "use a separate folder for each group" in text
        assert mine["load"].startswith("StateError: rank ") and whose in mine["load"]
