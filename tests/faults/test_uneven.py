"""hvd.join() with uneven batches: refused in words, soon and on every rank; with even ones it works."""

from __future__ import annotations

import pytest

from tests.support.nursery import Nursery

SECONDS = 20.0  # far below the timeout of 60


def _play(nursery: Nursery, world: int, path: str, joining: list[int], before: int = 3, pause: float = 0.0) -> None:
    found_out = path != "stock" and before > 0  # by themselves; else their hvd.join() ends with the job
    awaited = [rank for rank in range(world) if found_out or rank not in joining]
    case = {"path": path, "joining": joining, "before": before, "pause": pause, "await": awaited}
    ranks = nursery.run(world, "uneven.py", case)
    for rank in ranks:
        assert rank.report, f"rank {rank.number}: {rank.status} {rank.output}"
        assert rank.report.get("even", [None, ""]) == [None, ""]  # the control
        kind, text = rank.report["uneven"]
        assert rank.report["seconds"] < SECONDS, [(one.status, one.report, one.output) for one in ranks]
        assert rank.report["steps"] == before + 4 * (before > 0)
        if rank.number in joining:
            assert kind == "HorovodInternalError"  # from hvd.join()
            continue
        assert kind == "ConfigError" and "hvd.join() with uneven batches is not supported" in text, (kind, text)
        assert "drop_last=True" in text and "docs/limits.md" in text
        if before and (path != "stock" or world == 2):
            assert text.startswith("rank" if path != "stock" else f"rank(s) {joining[0]} called hvd.join()")
    told = [rank.output for rank in ranks if rank.number in joining]
    if found_out:  # by one of them at least: the first one ends Horovod, and with it the others' waits in hvd.join()
        assert any("called hvd.join() before step 7, in which rank(s)" in text for text in told), told


@pytest.mark.slow
def test_attached_with_a_pause_behind_the_first_join(nursery: Nursery) -> None:
    _play(nursery, 2, "attached", [1], pause=2.5)


def test_stock(nursery: Nursery) -> None:
    _play(nursery, 3, "stock", [2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "path", "joining"),
    [
        (2, "stock", [1]),
        (2, "stock", [0]),
        (3, "stock", [0, 2]),
        (3, "attached", [0]),
        (3, "attached", [1, 2]),
        (3, "update", [1]),
    ],
)
def test_others(nursery: Nursery, world: int, path: str, joining: list[int]) -> None:
    _play(nursery, world, path, joining)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["stock", "attached", "update"])
def test_before_the_first_step(nursery: Nursery, path: str) -> None:
    _play(nursery, 2, path, [1], before=0)
