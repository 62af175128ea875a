"""Ranks as threads of one process: for tests, simulation and examples without a network."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...errors import CorruptFrameError, PeerError
from ..device import Deadline

_POLL_SECONDS = 0.02


class Hub:
    """What the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.links, self.sums = _links(size), _links(size)  # messages, and what is added up
        self.beside, self.for_decoding = _links(size), _links(size)  # messages with an order to themselves
        self.notes: dict[int, dict[str, Any]] = {}
        self.words: dict[tuple[str, int], str] = {}
        self.listeners: dict[int, Callable[[], None]] = {}
        self.answers: dict[int, Callable[[], str]] = {}
        self.gone = [threading.Event() for _ in range(size)]

    def transports(self) -> list[LocalTransport]:
        """Return one transport per rank."""
        return [LocalTransport(self, rank) for rank in range(self.size)]


def _links(size: int) -> dict[tuple[int, int], queue.SimpleQueue[Any]]:
    return {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}


class LocalTransport:
    """One rank's end of a :class:`Hub`."""

    name = "local"
    link = None
    adds = frozenset({torch.float32, torch.float64})

    def __init__(self, hub: Hub, rank: int, links: dict[tuple[int, int], queue.SimpleQueue[Any]] | None = None) -> None:
        self._hub, self.rank, self.size = hub, rank, hub.size
        self._links = hub.links if links is None else links

    @property
    def aside(self) -> LocalTransport:
        return LocalTransport(self._hub, self.rank, self._hub.beside)

    @property
    def for_decoding(self) -> LocalTransport:
        return LocalTransport(self._hub, self.rank, self._hub.for_decoding)

    def send(self, data: Tensor, to: int) -> _Sent:
        self._links[self.rank, to].put(data.clone())
        return _Sent()

    def receive(self, data: Tensor, frm: int) -> _Receipt:
        return _Receipt(self._hub, self._links, data, frm, self.rank)

    def add_up(self, data: Tensor, deadline: Deadline) -> _LocalSum:
        sent = data.view(torch.uint8).clone()  # one for all, who only read it
        for peer in range(self.size):
            self._hub.sums[self.rank, peer].put(sent)
        return _LocalSum(self._hub, data, self.rank)

    def abort(self, note: dict[str, Any]) -> None:
        self._hub.notes.setdefault(self.rank, note)
        self._hub.gone[self.rank].set()
        for rank, call in list(self._hub.listeners.items()):
            if rank != self.rank:
                threading.Thread(target=call, name="hvc-flood", daemon=True).start()

    def notes(self, seconds: float) -> dict[int, dict[str, Any]]:
        end = time.monotonic() + seconds
        while len(self._hub.notes) < self.size and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        return dict(self._hub.notes)

    def on_abort(self, call: Callable[[], None]) -> None:
        self._hub.listeners[self.rank] = call

    def say(self, topic: str, text: str) -> None:
        self._hub.words[topic, self.rank] = text

    def said(self, topic: str) -> dict[int, str]:
        words = {rank: self._hub.words.get((topic, rank)) for rank in range(self.size)}
        return {rank: word for rank, word in words.items() if word is not None}

    @property
    def questions(self) -> _Questions:
        return _Questions(self._hub, self.rank)

    def close(self) -> None:
        pass  # a peer may still have to read what this rank sent last


class _Questions:
    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank

    def answer(self, call: Callable[[], str]) -> None:
        self._hub.answers[self._rank] = call

    def ask(self) -> dict[int, tuple[float, str]]:
        now = time.monotonic()
        return {rank: (now, call()) for rank, call in list(self._hub.answers.items()) if rank != self._rank}


class _Sent:
    def wait(self, deadline: Deadline) -> None:
        pass  # the data was copied when it was sent


class _LocalSum:
    """The sum over all ranks, in rank order."""

    def __init__(self, hub: Hub, data: Tensor, rank: int) -> None:
        self._hub, self._data, self._rank = hub, data, rank

    def wait(self, deadline: Deadline) -> None:
        total, part = torch.zeros_like(self._data), torch.empty_like(self._data)
        for peer in range(self._hub.size):
            _Receipt(self._hub, self._hub.sums, part.view(torch.uint8), peer, self._rank).wait(deadline)
            total += part
        self._data.copy_(total)


class _Receipt:
    def __init__(
        self, hub: Hub, links: dict[tuple[int, int], queue.SimpleQueue[Any]], data: Tensor, frm: int, to: int
    ) -> None:
        self._hub, self._links, self._data, self._frm, self._to = hub, links, data, frm, to

    def wait(self, deadline: Deadline) -> None:
        link, gone = self._links[self._frm, self._to], self._hub.gone[self._frm]
        while True:
            closed = gone.is_set()  # read first: what was sent before is still delivered
            try:
                data = link.get(timeout=0.0 if closed else min(_POLL_SECONDS, deadline.left()))
                break
            except queue.Empty:
                if closed:
                    raise PeerError(self._frm, False, "the peer aborted") from None
                if deadline.passed():
                    raise PeerError(self._frm, True, "no data before the deadline") from None
        if data.numel() != self._data.numel():
            raise CorruptFrameError(
                f"rank {self._to}: expected a frame of {self._data.numel()} bytes from rank {self._frm}, got one of "
                f"{data.numel()} bytes; check that every rank runs the same version of horovod-compress"
            )
        self._data.copy_(data)
