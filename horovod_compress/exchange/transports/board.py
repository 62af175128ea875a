"""Small values by key that every rank can read: what ranks leave for each other about waits and failures.

Every rank keeps a copy, and what one writes it sends to all others, over connections of their own: they stay when
those of the exchange are broken. So no rank has to serve it, and it outlives any of them. A thread for each peer waits
for its messages: Gloo sends nothing before somebody waits for it. These threads also answer questions, whatever the
other threads of their process do, as long as it is not stopped.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from ..device import Deadline
from .sockets import Connections

_LENGTH_TAG, _TEXT_TAG, _END_TAG = 0x48564200, 0x48564201, 0x48564202
_EVER = timedelta(days=365)
#: What has not left by then leaves later, unless the board is closed; to a frozen rank nothing ever does.
_SEND_SECONDS = 0.1
#: Threads end as soon as connections are broken. A process that ends before a thread has left Gloo is aborted.
END_SECONDS = 1.0
_MOST_BYTES = 1 << 20
_QUESTION, _ANSWER = "?", "!"  # keys of what is no value, and for one rank


class Board:
    """One rank's copy.

    Args:
        group: connects the ranks, and is used by nothing else; a ``ProcessGroupGloo``.
        connections: those of the group.
    """

    def __init__(self, group: Any, connections: Connections, rank: int, size: int) -> None:
        self._group, self._connections, self._rank = group, connections, rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._values: dict[str, str] = {}
        self._asked: set[int] = set()  # who has a question to answer: one at a time, as a frozen rank takes none away
        self._answered: dict[int, tuple[float, str]] = {}
        self._answer: Callable[[], str] = str
        self._lock = threading.Lock()
        self._waits: list[threading.Thread] = []  # for messages to leave
        self._readers = {
            peer: threading.Thread(target=self._read, args=(group, peer), name="hvc-board", daemon=True)
            for peer in self._peers
        }
        for thread in self._readers.values():
            thread.start()

    def set(self, key: str, value: str) -> None:
        """Write a value, for all ranks; those that are gone or frozen do not learn of it."""
        self._values[key] = value
        self._send(self._peers, key, value)

    def answer(self, call: Callable[[], str]) -> None:
        """Have questions answered with what this returns."""
        self._answer = call

    def ask(self) -> dict[int, tuple[float, str]]:
        """Ask all peers, and return their last answers so far, with when they came, on the monotonic clock."""
        peers = [peer for peer in self._peers if peer not in self._asked]
        self._asked.update(peers)
        self._send(peers, _QUESTION, "")
        return dict(self._answered)

    def _send(self, peers: Iterable[int], key: str, value: str) -> None:
        text = _bytes(json.dumps([key, value]).encode())
        length = torch.tensor([text.numel()], dtype=torch.int64, device="cpu").view(torch.uint8)
        end, sent = time.monotonic() + _SEND_SECONDS, []
        with self._lock:  # length and text belong together
            for peer in peers if self._group else ():
                with contextlib.suppress(RuntimeError):
                    sent += [self._group.send([length], peer, _LENGTH_TAG), self._group.send([text], peer, _TEXT_TAG)]
        self._wait(sent, end)

    def _wait(self, sent: Sequence[Any], end: float) -> None:
        """Wait until messages have left. A wait that runs out would break all connections, so nothing is waited for."""

        def wait() -> None:
            for work in sent:
                with contextlib.suppress(RuntimeError):
                    work.wait(_EVER)

        thread = threading.Thread(target=wait, name="hvc-board", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # none starts at the interpreter's end, and connections are not needed any more
            for work in sent:
                with contextlib.suppress(RuntimeError):
                    work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            return
        with self._lock:
            self._waits = [*(other for other in self._waits if other.is_alive()), thread]
        thread.join(max(0.0, end - time.monotonic()))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of these have a value."""
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """Return a value that there is."""
        return self._values[key].encode()

    def hears(self, rank: int) -> bool:
        """Return whether more may come from a rank: its end breaks the connection, after all that it has sent."""
        return rank == self._rank or self._readers[rank].is_alive()

    def close(self) -> None:
        """Break the connections, and end the threads."""
        with self._lock:
            group, self._group = self._group, None
        with self._connections.ended():
            for peer in self._peers if group else ():
                with contextlib.suppress(RuntimeError):
                    byte = torch.zeros(1, dtype=torch.uint8, device="cpu")
                    group.recv([byte], peer, _END_TAG).wait(timedelta(milliseconds=1))
        join([*self._readers.values(), *self._waits], END_SECONDS)

    def _read(self, group: Any, peer: int) -> None:
        # A RecursionError, of a value nested too deeply, is a RuntimeError.
        with contextlib.suppress(RuntimeError, ValueError, TypeError):  # the connection is broken, or of no more use
            while True:
                length = _received(group, _LENGTH_TAG, 8, peer)
                size = int(length.view(torch.int64))
                if not 0 < size <= _MOST_BYTES:
                    return
                key, value = json.loads(_received(group, _TEXT_TAG, size, peer).numpy().tobytes())
                self._take(peer, str(key), str(value))

    def _take(self, peer: int, key: str, value: str) -> None:
        if key == _QUESTION:
            self._send([peer], _ANSWER, self._answer())
        elif key == _ANSWER:
            self._answered[peer] = time.monotonic(), value
            self._asked.discard(peer)
        else:
            self._values[key] = value


def join(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait at most so long until threads have ended, but for the one that asks."""
    deadline = Deadline(seconds)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(deadline.left())


def _received(group: Any, tag: int, size: int, peer: int) -> Tensor:
    data = torch.zeros(size, dtype=torch.uint8, device="cpu")
    group.recv([data], peer, tag).wait(_EVER)
    return data


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
