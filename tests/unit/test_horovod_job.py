"""Whether a rank takes part, by what Horovod says of its process sets; and what it meets the others for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("horovod.torch")

import horovod.torch as hvd
from horovod.common import process_sets

from horovod_compress.engine.job import Gathering
from horovod_compress.errors import ExchangeError, MismatchError
from horovod_compress.fronts import startup
from horovod_compress.fronts.gather import COMMIT, ELASTIC
from horovod_compress.fronts.horovod import job
from horovod_compress.fronts.horovod.job import HorovodJob


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a job whose Horovod has begun."""
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)
    monkeypatch.setattr(process_sets._basics, "rank", lambda: 0)
    monkeypatch.setattr(hvd.global_process_set, "ranks", [])


def test_every_rank_is_in_the_whole_job(first: None) -> None:
    """Horovod's set has no ranks where another rank ends meanwhile: this one would train alone, and say nothing."""
    assert not hvd.global_process_set.included()
    assert HorovodJob(hvd.global_process_set).included()


@pytest.mark.parametrize("ranks", [[0, 2], [1, 2]])
def test_in_a_process_set_are_its_ranks(first: None, ranks: list[int]) -> None:
    some = hvd.ProcessSet(ranks)
    some.process_set_id = 1
    assert HorovodJob(some).included() == (0 in ranks)


# ---- what ranks of an elastic job meet for ----


def gathered(monkeypatch: pytest.MonkeyPatch, meant: Sequence[str], rank: int, *, goes_on: bool = False) -> Any:
    """Return what a rank finds where all have come to these gathers of an elastic job, each with its number."""
    used: list[str] = []

    def gather(value: Any, name: str, *given: Any) -> list[Any]:
        used.append(name)
        assert value == [meant[rank], rank]
        return [[name, number] for number, name in enumerate(meant)]

    monkeypatch.setattr(job, "gather", gather)
    monkeypatch.setattr(hvd, "rank", lambda: rank)
    monkeypatch.setattr(HorovodJob, "size", len(meant))
    under = "hvc.start" if meant[rank] == "hvc.start" else None
    asked = Gathering("hvc.handshake" if under else meant[rank], 1.0, under=under)
    found = HorovodJob(hvd.global_process_set, goes_on=goes_on).gather(rank, asked)
    assert used == ["hvc.any"]
    return found


def test_ranks_that_mean_different_things_meet_and_hear_of_it(
    first: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that joins ends; the others go on at their last commit. Else all end, as they would come to it again."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    joins = ["hvc.elastic", "hvc.load", "hvc.elastic"]
    words = r"rank\(s\) 0, 2 to the meeting of an elastic job.*, rank\(s\) 1 to the loading of .*within the function"
    for rank, kind in enumerate((ExchangeError, MismatchError, ExchangeError)):
        with pytest.raises(kind, match=f"rank {rank}: the ranks have come to different things: {words}"):
            gathered(monkeypatch, joins, rank)
    assert [text.partition(":")[0] for text in caplog.messages] == ["rank 0", "rank 2"]
    for rank in range(2):
        with pytest.raises(MismatchError, match=r"rank\(s\) 0 to the saving .*in the same order on every rank"):
            gathered(monkeypatch, ["hvc.save", "hvc.load"], rank)
    assert gathered(monkeypatch, ["hvc.load"] * 3, 1) == [0, 1, 2]


def test_other_jobs_meet_by_the_name_of_what_they_do(first: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC", raising=False)
    monkeypatch.setattr(job, "gather", lambda value, name, *given: [value, name])
    assert HorovodJob(hvd.global_process_set).gather(7, Gathering("hvc.load", 1.0)) == [7, "hvc.load"]
    of_a_start = Gathering("hvc.handshake", 1.0, under="hvc.start")
    assert HorovodJob(hvd.global_process_set).gather(7, of_a_start) == [7, "hvc.start"]


@pytest.mark.parametrize("meant", ["hvc.start", "hvc.update"])
def test_ranks_that_go_on_do_so_without_one_that_does_something_else(
    first: None, monkeypatch: pytest.MonkeyPatch, meant: str
) -> None:
    """Before they come to the meeting of the elastic job itself: at a compression's start, or an optimizer's."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    for rank, kind in enumerate((ExchangeError, MismatchError)):
        with pytest.raises(kind, match=r"rank\(s\) 0 to the .*, rank\(s\) 1 to the loading of .*within the function"):
            gathered(monkeypatch, [meant, "hvc.load"], rank, goes_on=rank == 0)
    with pytest.raises(MismatchError):  # the control: it does not go on from a run of before
        gathered(monkeypatch, [meant, "hvc.load"], 0)


def test_ranks_that_go_on_and_are_past_their_meeting_end(first: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would come to the same again: it is their program that has one rank save. The control may go on."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    for rank in range(2):
        with pytest.raises(MismatchError, match=r"rank\(s\) 0 to the saving of .*, rank\(s\) 1 to .* commit or part"):
            gathered(monkeypatch, ["hvc.save", COMMIT], rank)
        with pytest.raises(ExchangeError, match="go on together"):
            gathered(monkeypatch, [ELASTIC, COMMIT], rank)


def test_a_start_that_others_have_left_ends_at_once() -> None:
    """Where a rank has come to something else while others show their addresses, there is nobody to tell of it."""
    asked: list[str] = []

    class Apart:
        rank, size = 0, 2

        def gather(self, value: Any, given: Gathering) -> list[Any]:
            asked.append(given.name)
            raise MismatchError("rank 0: the ranks have come to different things")

    with pytest.raises(MismatchError, match="rank 0: the ranks have come to different things"):
        startup._connect_all("127.0.0.1", Apart(), 1.0, None)  # type: ignore[arg-type]
    assert asked == ["hvc.addresses"]


# ---- what was given up ----


class Handles:
    """Horovod's gathers of one rank: the first never takes place, the later ones at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shown, self.polled, self.runs = [], [], 0  # type: ignore[var-annotated]
        monkeypatch.setattr(hvd, "allgather_async", self.begin)
        monkeypatch.setattr(hvd, "poll", self.poll)
        monkeypatch.setattr(hvd, "synchronize", lambda handle: self.shown[handle])
        monkeypatch.setattr(hvd.global_process_set, "size", lambda: 1)
        monkeypatch.setattr(job, "Run", lambda: Run(self, self.runs))
        monkeypatch.setattr(job, "_shown", {})

    def begin(self, data: Any, **given: Any) -> int:
        self.shown.append(data)
        return len(self.shown) - 1

    def poll(self, handle: int) -> bool:
        self.polled.append(handle)
        return handle > 0


class Run:
    def __init__(self, handles: Handles, number: int) -> None:
        self._handles, self._number = handles, number

    def replaced(self) -> bool:
        return self._number != self._handles.runs


@pytest.mark.parametrize("is_replaced", [False, True], ids=["control", "another run"])
def test_what_was_given_up_in_a_run_of_before_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """Its number may be that of anything in this one."""
    handles = Handles(monkeypatch)

    def gather(seconds: float) -> list[Any]:
        return job.gather("value", "hvc.save", hvd.global_process_set, seconds, lambda: False)

    with pytest.raises(job.LateGather):
        gather(0.01)
    handles.polled.clear()
    handles.runs += is_replaced
    if is_replaced:
        assert gather(20.0) == ["value"] and 0 not in handles.polled
    else:
        with pytest.raises(job.LateGather):
            gather(0.01)
        assert {*handles.polled} == {0} and len(handles.shown) == 1


def test_what_was_interrupted_is_waited_for_as_what_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod takes no second gather of a name before the first has taken place."""

    def interrupt() -> bool:
        raise KeyboardInterrupt

    handles = Handles(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        job.gather("value", "hvc.save", hvd.global_process_set, 20.0, interrupt)
    with pytest.raises(job.LateGather):
        job.gather("value", "hvc.save", hvd.global_process_set, 0.01, lambda: False)
    assert {*handles.polled} == {0} and len(handles.shown) == 1


def test_threads_take_turns_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    handles, ended = Handles(monkeypatch), threading.Event()

    def gather(name: str, seconds: float, failed: Callable[[], bool] = lambda: False) -> list[Any]:
        return job.gather("value", name, hvd.global_process_set, seconds, failed)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(gather, "hvc.save", 20.0, ended.is_set)
        while not handles.shown:
            assert not first.done()
        with pytest.raises(job.LateGather):
            gather("hvc.save", 0.05)
        assert len(handles.shown) == 1
        assert gather("hvc.load", 20.0) == ["value"]  # the control
        ended.set()
    assert isinstance(first.exception(), job.StoppedGather)
