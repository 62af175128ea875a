"""Gathers take place among ranks that wait for them at the same time: what one has given up is no answer to another."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from horovod_compress.errors import CorruptFrameError
from horovod_compress.fronts import gather as gathers
from horovod_compress.fronts.gather import pack, why_not_together
from horovod_compress.fronts.torch_dist import store_gathers
from horovod_compress.fronts.torch_dist.store_gathers import FailedGather, Gathers
from tests.support.stores import SlowStore

LONG, SHORT = 20.0, 0.2


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks do not wait long for others to read, which need not end before them here, or to come again."""
    monkeypatch.setattr(store_gathers, "_PARTING_SECONDS", 0.05)
    monkeypatch.setattr(store_gathers, "_GRACE_SECONDS", 0.05)
    monkeypatch.setattr(gathers, "CONFIRMING_SECONDS", 0.2)


def job(world: int = 2, slow: float = 0.0) -> list[Gathers]:
    """Return a job whose ranks know each other, and whose last one is slow to read, by so many seconds."""
    store = dist.HashStore()
    stores = [SlowStore(store, 0.0) for _ in range(world)]
    ranks = [Gathers(stores[rank], "job", rank, world) for rank in range(world)]
    assert side_by_side(*(lambda rank=rank: rank.gather("hvc.handshake", 0, LONG, lambda: False) for rank in ranks))
    stores[-1].seconds = slow
    return ranks


def gather(rank: Gathers, value: Any, seconds: float = LONG) -> list[Any]:
    return rank.gather("hvc.save", value, seconds, lambda: False)


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each call returned, None where it waited in vain."""
    with ThreadPoolExecutor(len(calls)) as pool:
        done: list[Future[Any]] = [pool.submit(call) for call in calls]
    return [None if isinstance(one.exception(), FailedGather) else one.result() for one in done]


def all_at_once(ranks: list[Gathers], *values: Any) -> list[Any]:
    return side_by_side(*(lambda at=at: gather(ranks[at], values[at]) for at in range(len(ranks))))


def give_up(rank: Gathers, value: Any) -> None:
    with pytest.raises(FailedGather):
        gather(rank, value, SHORT)


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("world", [2, 3])
def test_who_comes_late_waits_in_vain_and_all_are_together_again_at_once(world: int) -> None:
    ranks = job(world)
    for _ in range(2):
        give_up(ranks[0], "left")
        give_up(ranks[1], "late")
        assert all_at_once(ranks, *range(world)) == [[*range(world)]] * world


def test_without_coming_again_a_late_rank_takes_what_was_left_for_an_answer() -> None:
    """The control."""
    ranks = job()
    give_up(ranks[0], "left")
    shown = ranks[1]._show("hvc.save", [0, "late"], store_gathers.Deadline(LONG), lambda: False)
    assert shown == [[0, "left"], [0, "late"]]


@pytest.mark.parametrize("control", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["", "control"])
def test_where_one_comes_just_before_the_limit_of_another_it_takes_place_for_both(
    monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    """It needs longer to read than the other one has left, so without some more time it would be alone."""
    monkeypatch.setattr(store_gathers, "_GRACE_SECONDS", 0.05)
    if control:
        monkeypatch.setattr(gathers, "CONFIRMING_SECONDS", 0.0)
    ranks = job(slow=2.2)
    found = side_by_side(lambda: gather(ranks[0], 0, 2.0), lambda: gather(ranks[1], 1))
    assert found == ([None, [0, 1]] if control else [[0, 1]] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("control", [False, True], ids=["", "control"])
def test_one_that_gave_up_before_and_comes_just_before_the_limit_of_another_is_not_alone(
    monkeypatch: pytest.MonkeyPatch, control: bool
) -> None:
    """The other one has seen what it left, and had more time for that; its new call needs as much again."""
    monkeypatch.setattr(store_gathers, "_GRACE_SECONDS", 0.05)
    monkeypatch.setattr(gathers, "CONFIRMING_SECONDS", 0.0 if control else 2.9)
    ranks = job()
    give_up(ranks[1], "left")
    ranks[1]._given.shows_late = {b"[1,1]": 1.5}
    found = side_by_side(lambda: gather(ranks[0], 0, 3.0), lambda: time.sleep(2.0) or gather(ranks[1], 1))
    assert found == ([None, [0, 1]] if control else [[0, 1]] * 2)


def test_who_begins_again_meets_those_that_are_still_waiting() -> None:
    ranks = job()
    give_up(ranks[0], "first")
    assert side_by_side(
        lambda: gather(ranks[1], "late"), lambda: time.sleep(SHORT) or gather(ranks[0], "again")
    ) == [["again", "late"]] * 2  # fmt: skip


def test_an_answer_that_is_being_read_when_the_limit_ends_is_one() -> None:
    ranks = job(slow=1.2)
    assert side_by_side(lambda: gather(ranks[0], 0), lambda: gather(ranks[1], 1, 1.0)) == [[0, 1]] * 2


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_what_ranks_find_was_shown_by_calls_that_overlap_theirs(world: int, seed: int) -> None:
    ranks, calls, draw = job(world), 4, random.Random(seed)
    plans = [[(draw.uniform(0, 0.1), draw.uniform(0.01, 0.12)) for _ in range(calls)] for _ in range(world)]
    spans: list[list[tuple[float, float]]] = [[] for _ in range(world)]

    def run(at: int) -> list[Any]:
        found = []
        for number, (pause, seconds) in enumerate(plans[at]):
            time.sleep(pause)
            began = time.monotonic()
            with contextlib.suppress(FailedGather):
                found.append((number, gather(ranks[at], [at, number], seconds)))
            spans[at].append((began, time.monotonic()))
        return found

    told = side_by_side(*(lambda at=at: run(at) for at in range(world)))
    for at, found in enumerate(told):
        for number, values in found:
            assert values[at] == [at, number]
            began, ended = spans[at][number]
            for other, theirs in values:
                assert spans[other][theirs][0] <= ended and spans[other][theirs][1] >= began
    assert all_at_once(ranks, *range(world)) == [[*range(world)]] * world


def test_a_rank_of_another_version_is_told_of_before_the_host_of_the_store_leaves() -> None:
    """It shows its values in another form, behind other letters."""
    ranks, began = job(slow=0.5), time.monotonic()
    other = store_gathers._Showing(1, b"HVCJ" + pack(1)[4:])
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ranks[1]._try, "hvc.save", other, store_gathers.Deadline(LONG), lambda: False, comes_again=True)
        with pytest.raises(CorruptFrameError, match="not a message of this package"):
            gather(ranks[0], 0)
        assert time.monotonic() - began >= 0.5  # until that one has read


def test_ranks_that_come_with_different_compressions_or_to_different_stages_hear_of_it() -> None:
    files, manifest = "hvc.save.files", "hvc.save.manifest"
    assert why_not_together([["one", files], ["one", files]], 0) is None
    for shown in ([["one", files], ["two", files]], [["one", files], ["two", manifest]]):
        assert "rank 1: the ranks have come to the saving of a checkpoint folder with different compressions" in str(
            why_not_together(shown, 1)
        )
    told = str(why_not_together([["one", files], ["one", manifest]], 0))
    assert "the ranks are at different stages of the saving of a checkpoint folder" in told
