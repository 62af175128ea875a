"""A stand-in for ``cupy.cuda.nccl``: ranks are threads, and memory is the host's."""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from horovod_compress.exchange.transports.transport import NcclLink, Transfer

POLL_SECONDS = 0.02


class NcclError(RuntimeError):
    """What CuPy raises."""


class World:
    """What the communicators of one process share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.links = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
        self.broken = threading.Event()
        self.made: list[Communicator] = []

    def left(self) -> int:
        """Return how many communicators were never aborted: CuPy would destroy them, which may wait for ever."""
        return sum(not communicator.aborted for communicator in self.made)

    def library(self) -> Library:
        return Library(self)


class Library:
    """The module, as one rank sees it: groups belong to a thread, and here every rank has its own."""

    NCCL_UINT8 = 1

    def __init__(self, world: World) -> None:
        self.world = world
        self.groups = 0
        self._calls: list[Any] = []
        self._open = False

    def NcclCommunicator(self, size: int, identity: tuple[int, ...], rank: int) -> Communicator:
        assert size == self.world.size and len(identity) == 128
        return Communicator(self, rank)

    def groupStart(self) -> None:
        assert not self._open
        self._open, self._calls = True, []
        self.groups += 1

    def groupEnd(self) -> None:
        """Send all, then receive: in a group neither waits for the other."""
        assert self._open
        self._open = False
        for send, address, count, link in self._calls:
            if send:
                link.put(ctypes.string_at(address, count))
        for send, address, count, link in self._calls:
            if not send:
                self._receive(address, count, link)

    def _receive(self, address: int, count: int, link: Any) -> None:
        while True:
            try:
                data = link.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                if self.world.broken.is_set():
                    raise NcclError("NCCL_ERROR_SYSTEM_ERROR: a rank has aborted") from None
        assert len(data) == count, f"{len(data)} bytes were sent and {count} are to be received: NCCL would hang"
        ctypes.memmove(address, data, count)

    def call(self, *arguments: Any) -> None:
        assert self._open, "a send outside a group waits for its receiver"
        self._calls.append(arguments)


class Communicator:
    def __init__(self, library: Library, rank: int) -> None:
        self._library, self._rank = library, rank
        self.aborted = False
        library.world.made.append(self)

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert kind == Library.NCCL_UINT8 and address and count > 0
        self._library.call(True, address, count, self._library.world.links[self._rank, peer])

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert kind == Library.NCCL_UINT8 and address and count > 0
        self._library.call(False, address, count, self._library.world.links[peer, self._rank])

    def check_async_error(self) -> None:
        if self._library.world.broken.is_set():
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR: a rank has aborted")

    def abort(self) -> None:
        self.aborted = True
        self._library.world.broken.set()


def together(link: NcclLink, ranks: Sequence[Iterable[Transfer]]) -> None:
    """Run the transfers of all ranks through the link of one: each send and its receive are both this rank's.

    For a machine with one GPU; NCCL matches what a rank sends to itself in order.
    """
    steps: list[Iterator[Transfer]] = [iter(own) for own in ranks]
    send, receive = link._call("send"), link._call("recv")
    while transfers := [transfer for transfer in (next(own, None) for own in steps) if transfer is not None]:
        due = {(frm, to): [] for frm in range(len(steps)) for to in range(len(steps))}  # type: dict[tuple[int, int], list[Tensor]]
        for to, transfer in enumerate(transfers):
            for data, frm in transfer.receives:
                due[frm, to].append(data)
        calls: list[tuple[Callable[..., None], Tensor, int]] = []
        for frm, transfer in enumerate(transfers):
            for data, to in transfer.sends:
                calls += [(send, data, link.rank), (receive, due[frm, to].pop(0), link.rank)]
        link.start(calls, transfers)
