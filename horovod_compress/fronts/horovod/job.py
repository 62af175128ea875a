"""Horovod's jobs: the ranks of a process set, and how these show each other plain data within a bound of time.

A gather of Horovod's does not say who is missing. But the rendezvous server that ``horovodrun`` starts, through which
Horovod's own ranks find each other, keeps small values by key: each rank leaves word there when it comes, and one that
has waited in vain reads who did not. Jobs without that server, as MPI starts them, do not learn it.
"""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError

from ...engine.agreement.handshake import Place
from ...engine.agreement.notes import ADVICE
from ...engine.job import Gathering
from ...engine.saved.manifests import RankGroup
from ...errors import ConfigError, ExchangeError, MismatchError, NonFiniteError
from ...exchange.device import Deadline
from ...exchange.transports import addresses
from ..gather import COMMIT, ELASTIC, FORKED, confirmed, pack, pause, unpack, why_apart, why_not_all
from .private import Run

#: What ranks that begin meet for first: one that joins a job has its model to make before.
_FIRST = "hvc.handshake"
#: The one name that Horovod knows all gathers of an elastic job by.
_ANY = "hvc.any"
#: What ranks come to that go on after a reset, perhaps one that others have not heard of: it may take place the next
#: time. Where they are past it they come to different things again.
_GOING_ON = {"hvc.start", "hvc.update", ELASTIC}
_WITH_JOIN = "is not supported with Join"  # in Horovod's refusal of a gather

_log = logging.getLogger("horovod_compress")


class HorovodJob:
    """The ranks of a process set, in the run of Horovod in which this was made.

    Args:
        process_set: one that Horovod knows.

    Attributes:
        goes_on: this rank comes from the run of before, and meets the others to go on.

    Raises:
        ConfigError: it is none, or Horovod has not been initialized.
    """

    def __init__(self, process_set: Any, *, goes_on: bool = False) -> None:
        self.goes_on = goes_on
        known = isinstance(process_set, hvd.ProcessSet) and process_set.process_set_id is not None
        if not known and process_set is not hvd.global_process_set:
            raise ConfigError(
                "process_set should be hvd.global_process_set, or what hvd.add_process_set([0, 1]) returned on every "
                f"rank; got {process_set if isinstance(process_set, hvd.ProcessSet) else repr(process_set)}"
            )
        if not hvd.is_initialized():
            raise ConfigError(
                "Horovod has not been initialized: call hvd.init() before the compression is created, and start the "
                "job with horovodrun"
            )
        self.process_set = process_set
        self.run = Run()

    @property
    def rank(self) -> int:
        return int(self.process_set.rank())

    @property
    def size(self) -> int:
        return int(self.process_set.size())

    @property
    def row(self) -> None:
        return None

    def agree(self, mine: NonFiniteError | None, seconds: float) -> NonFiniteError | None:
        return mine

    @property
    def number(self) -> int:
        return int(hvd.rank())

    def group_of_all(self) -> RankGroup | None:
        ranks, total = self.process_set.ranks, int(hvd.size())
        return None if ranks is None or len(ranks) == total else RankGroup(sorted(ranks), total)

    def running(self) -> bool:
        return bool(hvd.is_initialized())

    def included(self) -> bool:
        # Where another rank ends while this one is in hvd.init(), Horovod has no ranks in its global set.
        return self.process_set is hvd.global_process_set or bool(self.process_set.included())

    def forked(self) -> bool:
        return self.run.forked()

    def check(self) -> None:
        if self.run.forked():
            raise ConfigError(FORKED)
        if self.run.replaced():
            raise ConfigError(
                f"rank {hvd.rank()}: Horovod was shut down and started again, perhaps with other ranks, and this "
                "compression belongs to the previous ones. In an elastic job, let its state have the compression: "
                "hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)"
            )

    def place(self) -> Place:
        return Place(addresses.own_address(one_host=hvd.local_size() == hvd.size()))

    def gather(self, value: Any, asked: Gathering) -> list[Any]:
        if not _is_elastic():
            return self._gather(value, asked)
        # A rank that joins may come to something else than the others: by one name they meet, and all hear of it.
        found = self._gather([asked.under or asked.name, value], replace(asked, under=_ANY))
        numbers = self.process_set.ranks or list(range(self.size))
        if told := why_apart([name for name, _ in found], numbers, self.number):
            strays = not self.goes_on and asked.name not in (ELASTIC, COMMIT)
            if strays or not _GOING_ON.intersection(name for name, _ in found):
                raise MismatchError(told)
            _log.error("%s", told)  # hvd.elastic.run goes back to the last commit without a word
            raise ExchangeError(told)
        return [theirs for _, theirs in found]

    def gather_all(self, value: Any, asked: Gathering) -> list[Any]:
        return self.gather(value, asked)

    def _gather(self, value: Any, asked: Gathering) -> list[Any]:
        # Word that this rank is there: an error can then name the ranks that are not. It takes messages of its own.
        roll = RollCall(asked.name, self.process_set) if asked.by_name else None
        seconds = max(asked.seconds, _join_seconds()) if asked.name == _FIRST else asked.seconds
        try:
            values = gather(value, asked.under or asked.name, self.process_set, seconds, asked.failed)
        except HorovodInternalError as error:
            if _WITH_JOIN in str(error):
                raise ConfigError(
                    f"a rank has called hvd.join() while rank {hvd.rank()} begins a step; {ADVICE}"
                ) from None
            raise ExchangeError(_why_not_all(asked.name, error, roll)) from None
        if roll:
            roll.held()
        return values


def _join_seconds() -> float:
    """Return for how long ranks of an elastic job wait for others at the handshake, 0 in any other job.

    Those that join have a model to load, and those that go on have their callbacks. It is what Horovod allows for a
    change of hosts.
    """
    return float(os.environ.get("HOROVOD_ELASTIC_TIMEOUT") or 600.0) if _is_elastic() else 0.0


def _is_elastic() -> bool:
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def _why_not_all(name: str, error: Exception, roll: RollCall | None) -> str:
    """Return what is known of a gather that did not take place; what Horovod says of it, which is little, last."""
    late = isinstance(error, LateGather)
    said = " ".join(str(error).split()).rstrip(".")
    absent = roll.absent() if roll else []
    ended = "" if late else f". Horovod has ended, and says: {said}"
    return why_not_all(name, hvd.rank(), f"{said} s" if late else None, absent) + ended


# ---- Horovod's all-gather ----

_POLL_SECONDS = 0.002  # at most
#: Gathers that are under way, or were given up and may still take place, by name: Horovod knows no way to take one
#: back. Each has the run of Horovod that it is of, as the next one gives their numbers to others.
_shown: dict[str, tuple[int, Run]] = {}
_turns: dict[str, threading.Lock] = {}


class LateGather(HorovodInternalError):  # type: ignore[misc]
    """Some rank did not come to a gather in so many seconds."""


class StoppedGather(HorovodInternalError):  # type: ignore[misc]
    """It is known that not every rank will come."""


def gather(value: Any, name: str, process_set: Any, seconds: float, failed: Callable[[], bool]) -> list[Any]:
    """Return every rank's value, in rank order; tuples have become lists.

    Threads that gather under one name take turns, and the first of this rank meets the first of every other one.

    Args:
        value: plain data.
        failed: returns whether it is known that not every rank will come.

    Raises:
        LateGather: some rank did not come in time.
        HorovodInternalError: Horovod has ended.
        CorruptFrameError: what came is not what ranks send.
    """
    key, deadline = f"{name} {process_set.process_set_id}", Deadline(seconds)

    def show(shown: Any, within: Deadline) -> list[Any]:
        data, run = torch.frombuffer(bytearray(pack(shown)), dtype=torch.uint8), Run()
        _shown[key] = hvd.allgather_async(data, name=name, process_set=process_set), run
        return unpack(_take(key, within, failed).numpy().tobytes(), process_set.size())

    turn = _turns.setdefault(key, threading.Lock())
    if not turn.acquire(timeout=deadline.left()):
        raise LateGather(f"{seconds:g}")
    try:
        _wait_for_given_up(key, deadline, failed)
        return confirmed(value, show, deadline)
    finally:
        turn.release()


def _wait_for_given_up(key: str, deadline: Deadline, failed: Callable[[], bool]) -> None:
    """Wait until what this rank has given up under a name takes place, where it still may."""
    _, run = _shown.get(key, (0, None))
    if run is None or run.replaced():
        _shown.pop(key, None)
        return
    try:
        _take(key, deadline, failed)
    except (LateGather, StoppedGather):
        raise
    except (ValueError, HorovodInternalError):  # it has failed
        pass


def _take(key: str, deadline: Deadline, failed: Callable[[], bool]) -> torch.Tensor:
    """Wait for what all ranks show; where this one gives up, or is interrupted, it may still take place."""
    handle, _ = _shown[key]
    try:
        found = _wait(handle, deadline, failed)
    except (LateGather, StoppedGather):
        raise
    except (ValueError, HorovodInternalError):
        _shown.pop(key, None)
        raise
    _shown.pop(key, None)
    return found


def add_up(tensor: torch.Tensor, name: str, process_set: Any, seconds: float) -> None:
    """Let a tensor in host memory be its sum over ranks, the same bits on each.

    Raises:
        LateGather: some rank did not come in time; the job has to begin anew.
        HorovodInternalError: Horovod has ended.
    """
    handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum, process_set=process_set)
    _wait(handle, Deadline(seconds), lambda: False)


def broadcast(data: torch.Tensor, name: str, process_set: Any, seconds: float) -> None:
    """Give the bytes of rank 0 to all; likewise."""
    _wait(hvd.broadcast_async_(data, 0, name=name, process_set=process_set), Deadline(seconds), lambda: False)


def to_another(data: torch.Tensor, ahead: int, name: str, job: HorovodJob, seconds: float) -> torch.Tensor:
    """Send a tensor to the rank so many places ahead, counted round; return that of the one as far behind. Likewise."""
    counts = [data.numel() if rank == (job.rank + ahead) % job.size else 0 for rank in range(job.size)]
    splits = torch.tensor(counts, dtype=torch.int32, device="cpu")
    handle = hvd.alltoall_async(data, splits, name=name, process_set=job.process_set)
    found: Any = _wait(handle, Deadline(seconds), lambda: False)
    received: torch.Tensor = found[0]  # beside how much came from each rank
    return received


def _wait(handle: int, deadline: Deadline, failed: Callable[[], bool]) -> torch.Tensor:
    began = time.monotonic()
    while not hvd.poll(handle):
        if deadline.passed():
            raise LateGather(f"{deadline.seconds:g}")
        if failed():
            raise StoppedGather("another rank has stopped")
        pause(began, _POLL_SECONDS)
    return hvd.synchronize(handle)


# ---- who has come ----

_SCOPE = "hvc.rollcall"
_SECONDS = 2.0  # that the server may take to answer
_GRACE_SECONDS = 1.0
_HERE, _LEFT = "here", "left"


class RollCall:
    """Who has come to one gather of all ranks.

    Args:
        name: of the gather.
        process_set: the ranks that should come.
    """

    def __init__(self, name: str, process_set: Any) -> None:
        self._name = f"{name}.{process_set.process_set_id}"
        self._rank, self._ranks = process_set.rank(), range(process_set.size())
        self._numbers = process_set.ranks or list(self._ranks)  # of the whole job, as people know them
        self._say(_HERE)

    def _say(self, word: str) -> None:
        _call("PUT", f"{self._name}.{self._rank}", word)

    def held(self) -> None:
        """Note that every rank has come, as there may be another gather of this name."""
        self._say(_LEFT)

    def absent(self) -> list[int]:
        """Return the ranks that have not come, as far as is known; one that came to an earlier gather in vain has."""
        if self._missing():
            time.sleep(_GRACE_SECONDS)  # where the first of all has ended, others may be about to come
        return self._missing()

    def _missing(self) -> list[int]:
        missing = []
        for rank in self._ranks:
            word = _call("GET", f"{self._name}.{rank}")
            if word is None:
                return []  # the server does not answer
            if word != _HERE:
                missing.append(self._numbers[rank])
        return missing


def _call(verb: str, key: str, value: str | None = None) -> str | None:
    """Ask the server; return its answer, empty if it has no such value, or None if there is no server."""
    host, port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if not host or not port:
        return None
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # a message may go without names
        connection = http.client.HTTPConnection(host, int(port), timeout=_SECONDS)
        with contextlib.closing(connection):
            connection.request(verb, f"/{_SCOPE}/{key}", value)
            answer = connection.getresponse()
            return answer.read().decode() if answer.status == http.client.OK else ""
    return None
