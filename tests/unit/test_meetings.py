"""Gathers of a compression that has started: what a rank has shown and given up is no answer to anything later."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from horovod_compress.engine.job import Gathering
from horovod_compress.errors import ExchangeError
from horovod_compress.fronts.gather import Meetings, pack, unpack
from horovod_compress.fronts.torch_dist import job as torch_job
from horovod_compress.fronts.torch_dist.job import FailedGather, Gathers

WORLD, LONG, SHORT = 2, 20.0, 0.2
APART = "different rounds of the saving of a checkpoint folder"


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks do not wait long for others to read, which need not end before them here."""
    monkeypatch.setattr(torch_job, "_PARTING_SECONDS", 0.1)


class Ranks:
    """A job, as one of its ranks sees it."""

    def __init__(self, store: Any, rank: int) -> None:
        self.number, self._gathers = rank, Gathers(store, "job", rank, WORLD)

    def gather(self, value: Any, asked: Gathering) -> list[Any]:
        try:
            parts = self._gathers.gather(asked.name, pack(value), asked.seconds, asked.failed)
        except FailedGather as error:
            raise ExchangeError(f"late: {error}") from None
        return unpack(b"".join(parts), WORLD)


def job() -> list[Any]:
    store = dist.HashStore()
    return [Ranks(store, rank) for rank in range(WORLD)]


def meetings(name: str) -> list[Meetings]:
    return [Meetings(name) for _ in range(WORLD)]


def asked(seconds: float = LONG) -> Gathering:
    return Gathering("hvc.save", seconds)


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each call returned, or the text of its error."""
    with ThreadPoolExecutor(len(calls)) as pool:
        done: list[Future[Any]] = [pool.submit(call) for call in calls]
    return [str(one.exception()) if one.exception() else one.result() for one in done]


def test_who_comes_late_does_not_go_on_with_who_begins_again() -> None:
    """Else each would take the other's next value for one of its own round."""
    ranks, mine = job(), meetings("one")
    with pytest.raises(ExchangeError, match="late"):
        mine[0].gather(ranks[0], "first", asked(SHORT))
    assert mine[1].gather(ranks[1], "late", asked()) == ["first", "late"]  # which nobody can tell from in time
    told = side_by_side(
        lambda: mine[0].gather(ranks[0], "again", asked()), lambda: mine[1].gather(ranks[1], "second", asked())
    )
    assert all(APART in text for text in told), told
    for _ in range(2):  # and from then on they are together
        found = side_by_side(*(lambda at=at: mine[at].gather(ranks[at], at, asked()) for at in range(WORLD)))
        assert found == [[0, 1]] * WORLD


def test_what_another_compression_has_left_is_no_answer() -> None:
    ranks, before, now = job(), meetings("before"), meetings("now")
    with pytest.raises(ExchangeError, match="late"):
        before[1].gather(ranks[1], "left", asked(SHORT))
    found = side_by_side(*(lambda at=at: now[at].gather(ranks[at], at, asked()) for at in range(WORLD)))
    assert found == [[0, 1]] * WORLD
    # The control: without rounds it is one.
    with pytest.raises(ExchangeError, match="late"):
        ranks[1].gather("left", asked(SHORT))
    assert ranks[0].gather(0, asked()) == [0, "left"]


def test_compressions_in_another_order_are_an_error_on_all() -> None:
    ranks, first, second = job(), meetings("first"), meetings("second")
    told = side_by_side(lambda: first[0].gather(ranks[0], 0, asked()), lambda: second[1].gather(ranks[1], 1, asked()))
    assert all("with different compressions" in text for text in told), told


def test_ranks_of_a_row_have_other_names_which_they_show_first() -> None:
    ranks, mine = job(), [Meetings(f"column {rank}") for rank in range(WORLD)]
    for _ in range(2):
        found = side_by_side(*(lambda at=at: mine[at].gather(ranks[at], at, asked(), row=True) for at in range(WORLD)))
        assert found == [[0, 1]] * WORLD
    mine[1] = Meetings("another column")
    with pytest.raises(ExchangeError):
        mine[1].gather(ranks[1], "left", asked(SHORT), row=True)
    with pytest.raises(ExchangeError, match="late"):
        mine[0].gather(ranks[0], 0, asked(SHORT), row=True)
