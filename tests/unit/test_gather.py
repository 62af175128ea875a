"""Gathers through the store of a process group: little stays there, and who is missing is named in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from horovod_compress.fronts.torch_dist.store_gathers import FailedGather, Gathers
from tests.support.stores import SlowStore

WORLD, LONG, SHORT = 3, 20.0, 0.2


def never() -> bool:
    return False


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def ranks(store: Any, prefix: str = "job") -> list[Gathers]:
    return [Gathers(store, prefix, rank, WORLD) for rank in range(WORLD)]


def meet(who: list[Gathers], name: str, said: Callable[[int], str], seconds: float = LONG) -> list[Any]:
    """Let ranks meet, and return what each gets or raises."""

    def one(rank: int) -> Any:
        try:
            return who[rank].gather(name, said(rank), seconds, never)
        except FailedGather as error:
            return error

    with ThreadPoolExecutor(len(who)) as pool:
        return list(pool.map(one, range(len(who))))


def word(rank: int) -> str:
    return f"{rank}\0\u00ff"


def test_every_rank_gets_all_values_in_order(store: Any) -> None:
    job = ranks(store)
    for turn in range(3):
        found = meet(job, "a", lambda rank, turn=turn: word(rank) + str(turn))
        assert found == [[word(rank) + str(turn) for rank in range(WORLD)]] * WORLD
    assert meet(job, "b", word) == [[word(rank) for rank in range(WORLD)]] * WORLD


def test_little_is_left_in_the_store(store: Any) -> None:
    job = ranks(store)
    meet(job, "a", word)
    before = store.num_keys()
    for _ in range(5):
        meet(job, "a", word)
    assert store.num_keys() == before


def test_ranks_that_do_not_come_are_named(store: Any) -> None:
    found = meet(ranks(store)[:2], "a", word, SHORT)
    assert [(error.late, error.absent) for error in found] == [(True, [2])] * 2
    assert str(found[0]) == "0.2 s"


def test_jobs_do_not_meet_each_other(store: Any) -> None:
    meet(ranks(store, "one"), "a", word)
    found = meet(ranks(store, "two")[:1], "a", word, SHORT)
    assert found[0].absent == [1, 2]


def test_a_failure_elsewhere_ends_the_wait(store: Any) -> None:
    failed = threading.Event()
    threading.Timer(0.1, failed.set).start()
    began = time.monotonic()
    with pytest.raises(FailedGather, match="another rank has stopped") as caught:
        ranks(store)[0].gather("a", "", LONG, failed.is_set)
    assert not caught.value.late and time.monotonic() - began < LONG / 2


class Frozen:
    """A store whose host does not answer."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def add(self, key: str, number: int) -> int:
        self.end.wait(LONG)
        return number

    def set(self, key: str, value: bytes) -> None:
        self.end.wait(LONG)


class FrozenBefore(Frozen):
    """Its host has not even answered that a rank may connect."""

    def clone(self) -> Any:
        self.end.wait(LONG)
        return self


class Gone(Frozen):
    def set(self, key: str, value: bytes) -> None:
        raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("kind", [Frozen, FrozenBefore])
def test_a_store_that_hangs_is_not_waited_for(kind: type[Frozen]) -> None:
    frozen, began = kind(), time.monotonic()
    with pytest.raises(FailedGather) as caught:
        ranks(frozen)[0].gather("a", "", SHORT, never)
    frozen.end.set()
    assert caught.value.late and caught.value.absent == [] and time.monotonic() - began < LONG / 2


class Lapsing:
    """A store that does not take some values, of those that are shown."""

    def __init__(self, store: Any) -> None:
        self._store, self.lapses = store, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: bytes) -> None:
        if self.lapses and value:
            self.lapses -= 1
            raise RuntimeError("Too many open files")
        self._store.set(key, value)

    def clone(self) -> Any:
        return self


@pytest.mark.parametrize("met", [False, True])
def test_after_a_call_that_failed_the_next_gather_of_all_takes_place(store: Any, met: bool) -> None:
    job, lapsing = ranks(store), Lapsing(store)
    job[1] = Gathers(lapsing, "job", 1, WORLD)
    if met:
        assert meet(job, "a", word) == [[word(rank) for rank in range(WORLD)]] * WORLD
    lapsing.lapses = 1
    found = meet(job, "a", word, SHORT)
    assert all(isinstance(one, FailedGather) for one in found) and "Too many open files" in str(found[1])
    assert meet(job, "a", str) == [[str(rank) for rank in range(WORLD)]] * WORLD


def interrupt() -> bool:
    raise KeyboardInterrupt


def no_thread_is_left() -> None:
    until = time.monotonic() + LONG
    while any(thread.name == "hvc-meet" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_after_an_interrupt_nothing_goes_on_and_the_next_gather_of_all_takes_place(store: Any) -> None:
    job = ranks(store)
    assert meet(job, "a", word) == [[word(rank) for rank in range(WORLD)]] * WORLD
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            job[0].gather("a", "interrupted", LONG, interrupt)
    no_thread_is_left()
    assert meet(job, "a", str) == [[str(rank) for rank in range(WORLD)]] * WORLD


def test_calls_that_an_interrupt_has_left_see_all_keys_that_they_read(store: Any) -> None:
    """These go with the next gather, which therefore waits for such calls; they would wait for the keys."""
    slow = SlowStore(store, 0.0)
    job = [Gathers(store, "job", 0, WORLD), Gathers(slow, "job", 1, WORLD), Gathers(store, "job", 2, WORLD)]
    assert meet(job, "a", word) == [[word(rank) for rank in range(WORLD)]] * WORLD
    others: list[Any] = []
    thread = threading.Thread(target=lambda: others.append(meet([job[0], job[2]], "a", str)))
    slow.seconds = 0.5
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        job[1].gather("a", "interrupted", LONG, lambda: slow.reads and interrupt())
    slow.seconds = 0.0
    assert job[1].gather("a", "again", LONG, never) == ["0", "again", "1"]
    thread.join(LONG)
    assert others == [[["0", "again", "1"]] * 2]
    assert meet(job, "a", str) == [[str(rank) for rank in range(WORLD)]] * WORLD
    no_thread_is_left()


def test_a_thread_whose_rank_waits_already_names_who_is_missing(store: Any) -> None:
    job = ranks(store)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(job[0].gather, "a", "x", 1.5, never)
        while not store.check([job[0]._here[0]]):
            time.sleep(0.01)
        with pytest.raises(FailedGather) as caught:
            job[0].gather("b", "x", SHORT, never)
    assert caught.value.absent == first.exception().absent == [1, 2]  # type: ignore[union-attr]


def test_a_store_that_is_gone_is_told() -> None:
    with pytest.raises(FailedGather, match="does not answer: Connection reset by peer"):
        ranks(Gone())[0].gather("a", "", LONG, never)
