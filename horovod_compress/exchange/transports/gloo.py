"""Bytes over TCP through torch.distributed's Gloo, in groups of our own.

The user's default process group is not touched. Gloo breaks a connection as soon as one end dies,
and fails a wait when its deadline passes; what it lacks is telling the ranks that are not
connected in the ring. So a rank that fails closes all its connections, which fails its neighbours
in turn, after leaving a note for all that says what it saw: on a :class:`.board.Board`, whose connections stay.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import ExchangeError, PeerError
from ..device import Deadline
from .board import END_SECONDS, Board, join
from .connecting import Addresses, Listener, Proof, Share, advice, is_exhausted
from .sockets import Connections
from .transport import Broken

_TAG = 0x48564346  # one ordered stream per pair of ranks
_NEVER_TAG = _TAG + 1
_WATCH_TAG = _TAG + 2
_FLOOD_TAG = _TAG + 3
_ASIDE_TAG = _TAG + 5
_APART_TAG = _TAG + 6
_BYE_SECONDS = 0.1
_EVER = timedelta(days=365)
_NOTE_SECONDS = 0.5
_POLL_SECONDS = 0.05


def available() -> bool:
    """Return whether this torch was built with Gloo."""
    return dist.is_available() and dist.is_gloo_available()


class GlooTransport:
    """One rank's connections to all others.

    Args:
        share: shows values to all ranks; every rank of the job calls it, twice.
        own: the address at which this rank listens.
        seconds: how long to wait for the other ranks to connect.

    Raises:
        ExchangeError: not every rank connected in time.
    """

    name = "gloo"
    link = None
    #: Gloo adds 16-bit floats one by one, and slower than the merge of this package.
    adds = frozenset({torch.float32, torch.float64})

    def __init__(self, share: Share, rank: int, size: int, own: str, seconds: float) -> None:
        self.rank, self.size = rank, size
        deadline = Deadline(seconds)
        self._group, self._connections = _connected(share, rank, size, own, deadline)
        self._board = Board(*_connected(share, rank, size, own, deadline), rank, size)
        # A transfer keeps the connections open, and a traceback may keep the transfer.
        self._pending: weakref.WeakSet[_Transfer] = weakref.WeakSet()
        self._lock = threading.Lock()  # close() comes from another thread than the transfers
        self._listeners: list[threading.Thread] = []
        self._watches: list[threading.Thread] = []
        self._closing = False

    def send(self, data: Tensor, to: int) -> _Transfer:
        return self._start("send", data, to)

    def receive(self, data: Tensor, frm: int) -> _Transfer:
        return self._start("recv", data, frm)

    @property
    def aside(self) -> _Aside:
        return _Aside(self, _ASIDE_TAG)

    @property
    def for_decoding(self) -> _Aside:
        return _Aside(self, _APART_TAG)

    def watch(self, peer: int) -> Broken:
        """Return what is set when the connection to a peer breaks, whichever end breaks it.

        Raises:
            PeerError: it is broken.
        """
        broken, board = Broken(), self._board
        transfer = self._start("recv", torch.zeros(1, dtype=torch.uint8, device="cpu"), peer, _WATCH_TAG)

        def look() -> None:
            work = transfer.work
            with contextlib.suppress(RuntimeError):
                if work is not None:
                    work.wait(_EVER)  # nobody ever sends this
            transfer.work = None
            broken.noted = _has_note(board, peer)  # one that aborts leaves it before it breaks its connections
            broken.set()

        thread = threading.Thread(target=look, name="hvc-watch", daemon=True)
        thread.start()
        self._watches.append(thread)
        return broken

    def _start(self, what: str, data: Tensor, peer: int, tag: int = _TAG) -> _Transfer:
        return self._begin(lambda group: getattr(group, what)([data], peer, tag), peer)

    def _begin(self, call: Callable[[Any], Any], peer: int) -> _Transfer:
        group = self._group
        if group is None:
            raise PeerError(peer, False, "this transport was aborted or closed")
        try:
            transfer = _Transfer(call(group), peer)
        except RuntimeError as error:
            raise PeerError(peer, False, _first_line(error)) from None
        with self._lock:
            self._pending.add(transfer)
        return transfer

    def add_up(self, data: Tensor, deadline: Deadline) -> _Transfer:
        options = dist.AllreduceOptions()
        options.timeout = _seconds_left(deadline)
        return self._begin(lambda group: group.allreduce([data], options), (self.rank - 1) % self.size)

    def _transfers(self) -> list[_Transfer]:
        with self._lock:
            return list(self._pending)

    def abort(self, note: dict[str, Any]) -> None:
        self._board.set(f"abort/{self.rank}", json.dumps(note))
        self._closing = True
        with self._connections.ended():
            self._break()
        self._drop()

    def notes(self, seconds: float) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        board, end, due = self._board, time.monotonic() + seconds, set(range(self.size))
        while due and time.monotonic() < end:
            gone = {rank for rank in due if not board.hears(rank)}  # looked at first: their last words are there then
            for rank in due:
                if board.check([f"abort/{rank}"]):
                    found[rank] = _parsed(board.get(f"abort/{rank}"))
            due -= gone | set(found)
            if due:
                time.sleep(_POLL_SECONDS)
        return found

    def on_abort(self, call: Callable[[], None]) -> None:
        """Listen to the neighbours in the ring only: each rank that hears of an abort aborts itself, and passes it on.

        One that closes says so; a connection that breaks without a word is either an abort, of which there is a note,
        or the end of a process, which whoever needs that rank learns soon enough.
        """
        for peer in _neighbours(self.rank, self.size):
            with contextlib.suppress(PeerError):
                self._listen(peer, call)

    def _listen(self, peer: int, call: Callable[[], None]) -> None:
        byte, board = torch.zeros(1, dtype=torch.uint8, device="cpu"), self._board
        transfer = self._start("recv", byte, peer, _FLOOD_TAG)

        def listen() -> None:
            work, closed = transfer.work, True
            try:
                if work is not None:
                    work.wait(_EVER)
            except RuntimeError:
                closed = self._closing
            transfer.work = None
            if not closed and _has_note(board, peer):
                call()

        thread = threading.Thread(target=listen, name="hvc-listen", daemon=True)
        thread.start()
        self._listeners.append(thread)

    def _take_leave(self) -> None:
        """Tell the neighbours that this rank closes its connections, and has not aborted."""
        bye = torch.zeros(1, dtype=torch.uint8, device="cpu")
        for peer in _neighbours(self.rank, self.size) if self._listeners else ():
            with contextlib.suppress(PeerError):
                self._start("send", bye, peer, _FLOOD_TAG).wait(Deadline(_BYE_SECONDS))

    def say(self, topic: str, text: str) -> None:
        self._board.set(f"{topic}/{self.rank}", text)

    def said(self, topic: str) -> dict[int, str]:
        keys = {rank: f"{topic}/{rank}" for rank in range(self.size)}
        return {rank: self._board.get(key).decode() for rank, key in keys.items() if self._board.check([key])}

    @property
    def questions(self) -> Board:
        return self._board

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._take_leave()
        with self._connections.ended():
            if any(transfer.work is not None for transfer in self._transfers()):
                self._break()  # some thread may be waiting, and would keep the connections open
            self._drop()
        self._board.close()
        join([*self._listeners, *self._watches], END_SECONDS)

    def _break(self) -> None:
        """Close every connection now, whoever still waits for a transfer or holds one.

        Gloo closes all connections of a group when one wait in it times out, and has no other
        call for that: so wait for what no rank ever sends. Not of one peer only: if that one is
        gone, the wait fails before it begins, and leaves the other connections open.
        """
        group = self._group
        if group is None:
            return
        nothing = torch.zeros(1, dtype=torch.uint8, device="cpu")
        for peer in set(range(self.size)) - {self.rank}:
            with contextlib.suppress(RuntimeError):
                group.recv([nothing], peer, _NEVER_TAG).wait(timedelta(milliseconds=1))

    def _drop(self) -> None:
        for transfer in self._transfers():
            transfer.work = None
        self._group = None


def _neighbours(rank: int, size: int) -> set[int]:
    """Return the ranks on both sides of one in the ring."""
    return {(rank - 1) % size, (rank + 1) % size} - {rank}


def _connected(share: Share, rank: int, size: int, own: str, deadline: Deadline) -> tuple[Any, Connections]:
    """Return a group that connects all ranks, and its connections.

    Raises:
        ExchangeError: not every rank connected in time.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _seconds_left(deadline)
    listener, proof = Listener(rank, size), Proof(rank, size)
    listener.check_descriptors()

    def shared(values: dict[str, bytes]) -> dict[str, bytes]:
        listener.narrow(values.values())
        found = share(values | proof.shown())
        proof.see(found)
        return found

    addresses = Addresses(shared)
    try:
        options._devices = [_device(own)]
        group = dist.ProcessGroupGloo(addresses, rank, size, options)
    except RuntimeError as error:
        if addresses.problem:
            raise addresses.problem from None
        if is_exhausted(error):
            raise ExchangeError(f"rank {rank}: cannot connect: {_first_line(error)}; {advice()}") from None
        raise ExchangeError(
            f"rank {rank}: not all of {size} ranks connected within {deadline.seconds:g} s: {_first_line(error)}; set "
            f"HOROVOD_GLOO_IFACE to a network interface that all hosts share, or raise timeout="
        ) from None
    listener.shut()
    proof.check(group, lambda: _seconds_left(deadline))
    return group, listener.connections()


def _device(own: str) -> Any:
    """Return Gloo's device at an address; connections are made at once."""
    create = dist.ProcessGroupGloo.create_device
    try:
        return create(hostname=own, lazy_init=False)
    except TypeError:  # an earlier torch, which cannot make them later
        return create(hostname=own)


class _Aside:
    """The same connections under another tag, so that no message here meets a receive there."""

    def __init__(self, whole: GlooTransport, tag: int) -> None:
        self._whole, self._tag, self.rank, self.size = whole, tag, whole.rank, whole.size

    def send(self, data: Tensor, to: int) -> _Transfer:
        return self._whole._start("send", data, to, self._tag)

    def receive(self, data: Tensor, frm: int) -> _Transfer:
        return self._whole._start("recv", data, frm, self._tag)


class _Transfer:
    __slots__ = ("__weakref__", "_peer", "work")

    def __init__(self, work: Any, peer: int) -> None:
        self.work, self._peer = work, peer

    def wait(self, deadline: Deadline) -> None:
        work = self.work
        if work is None:
            raise PeerError(self._peer, False, "this transport was aborted")
        try:
            if not work.wait(_seconds_left(deadline)):  # Gloo's word for a wait that was called off
                raise PeerError(self._peer, False, "the transfer was cancelled")
        except RuntimeError as error:
            raise PeerError(self._peer, "timed out" in str(error).lower(), _first_line(error)) from None
        finally:
            self.work = None


def _seconds_left(deadline: Deadline) -> timedelta:
    """Return what Gloo takes for a timeout: zero would be none at all."""
    return timedelta(milliseconds=max(1, int(deadline.left() * 1000)))


def _has_note(board: Board, rank: int) -> bool:
    """Return whether a rank has left a note; it may still be on its way when the connections break."""
    end = time.monotonic() + _NOTE_SECONDS
    while True:
        more = board.hears(rank) and time.monotonic() < end  # first, as in notes()
        if (found := board.check([f"abort/{rank}"])) or not more:
            return found
        time.sleep(_POLL_SECONDS)


def _parsed(text: bytes) -> Any:
    """Return a note as it was left; what is none says nothing."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _first_line(error: Exception) -> str:
    """Return Gloo's message without its source position and its advice."""
    text = str(error).splitlines()[0]
    return text.partition("] ")[2].partition(". This is typically")[0] or text
