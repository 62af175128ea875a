"""Gathers that end: the host of the store leaves last, threads share a group, and the next run begins anew."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from horovod_compress.fronts.torch_dist import store_gathers
from horovod_compress.fronts.torch_dist.store_gathers import FailedGather, Gathers
from tests.support.stores import SlowStore

WORLD, LONG, SHORT = 2, 20.0, 0.2
ROOT = Path(__file__).resolve().parents[2]


def never() -> bool:
    return False


def gather_all(job: list[Gathers], name: str, said: str = "") -> list[list[str]]:
    with ThreadPoolExecutor(len(job)) as pool:
        turns = [pool.submit(who.gather, name, said, LONG, never) for who in job]
        return [turn.result() for turn in turns]


def test_a_rank_leaves_when_all_have_read() -> None:
    store = dist.HashStore()
    slow = SlowStore(store, 0.0)
    job = [Gathers(store, "job", 0, WORLD), Gathers(slow, "job", 1, WORLD)]
    gather_all(job, "first")
    slow.seconds = 0.3
    began = time.monotonic()
    assert gather_all(job, "a", "x") == [["x"] * WORLD] * WORLD
    assert time.monotonic() - began >= 0.6  # values were read slowly, and once more when all had come again
    with ThreadPoolExecutor(2) as pool:
        turns = [pool.submit(who.gather, "a", "y", LONG, never) for who in job]
        turns[0].result()
        assert store.check([job[1].key("a") + "/4/read/1"])


def test_it_does_not_wait_long_for_one_that_does_not_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_gathers, "_PARTING_SECONDS", 0.2)
    store = dist.HashStore()
    job = [Gathers(store, "job", rank, WORLD) for rank in range(WORLD)]
    gather_all(job, "first")
    with pytest.raises(FailedGather):
        job[0].gather("a", "x", SHORT, never)  # shows a value, and does not read
    assert job[1]._show("a", [1, "y"], store_gathers.Deadline(LONG), never) == [[0, "x"], [1, "y"]]


HOST = """
import datetime, os, sys, time
import torch.distributed as dist
from horovod_compress.fronts.torch_dist import store_gathers

rank, port = int(sys.argv[1]), int(sys.argv[2])
limit = datetime.timedelta(seconds=30)
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, limit, wait_for_workers=False)
if rank == 0:
    print(store.port, flush=True)
else:
    look = store_gathers._Store.get  # this one is slow
    store_gathers._Store.get = lambda *given: time.sleep(0.3) or look(*given)
if len(sys.argv) > 3:
    store_gathers._PARTING_SECONDS = 0.0
gathers = store_gathers.Gathers(store, "job", rank, 2)
print(gathers.gather("save", "x", 20.0, lambda: False), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("leaves_at_once", [False, True], ids=["", "control"])
def test_the_host_of_the_store_may_end_right_after_a_gather(leaves_at_once: bool) -> None:
    """The control leaves as soon as it has read, and fails the other rank."""
    command = [sys.executable, "-W", "ignore", "-c", HOST]
    more = ["at once"] * leaves_at_once

    def start(rank: int, port: str) -> subprocess.Popen[str]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
        return subprocess.Popen([*command, str(rank), port, *more], **pipes)  # type: ignore[call-overload,no-any-return]

    host = start(0, "0")
    assert host.stdout
    other = start(1, host.stdout.readline().strip())
    try:
        said, errors = other.communicate(timeout=60)
    finally:
        for process in (host, other):
            process.kill()
            process.communicate()
    assert ("['x', 'x']" in said) != leaves_at_once, errors


def test_threads_of_a_rank_take_turns_under_one_name() -> None:
    store, times = dist.HashStore(), 8
    job = [Gathers(store, "job", rank, WORLD) for rank in range(WORLD)]
    with ThreadPoolExecutor(WORLD * times) as pool:
        turns = [pool.submit(who.gather, "a", "x", LONG, never) for _ in range(times) for who in job]
        assert [turn.result() for turn in turns] == [["x"] * WORLD] * (WORLD * times)


def test_the_next_run_on_the_same_store_reads_nothing_of_the_one_before() -> None:
    """Other processes may take part in it, which know nothing of that."""
    store = dist.HashStore()
    gather_all([Gathers(store, "job", rank, WORLD) for rank in range(WORLD)], "a", "old")
    again = [Gathers(store, "job", rank, WORLD) for rank in range(WORLD)]
    with pytest.raises(FailedGather) as caught:
        again[0].gather("a", "new", SHORT, never)
    assert caught.value.absent == [1]
    assert gather_all(again, "a", "new") == [["new"] * WORLD] * WORLD
    more = [Gathers(store, "job", rank, WORLD + 1) for rank in range(WORLD + 1)]
    assert gather_all(more, "a", "new") == [["new"] * (WORLD + 1)] * (WORLD + 1)


@pytest.mark.parametrize("times", [1, 3])
def test_a_rank_that_failed_before_its_first_gather_meets_the_others_in_the_next_run(times: int) -> None:
    """So the numbers of their runs differ."""
    store = dist.HashStore()
    for _ in range(times):
        with pytest.raises(FailedGather) as caught:
            Gathers(store, "job", 0, WORLD).gather("a", "old", SHORT, never)
        assert caught.value.absent == [1]
    again = [Gathers(store, "job", rank, WORLD) for rank in range(WORLD)]
    assert gather_all(again, "a", "new") == [["new"] * WORLD] * WORLD
