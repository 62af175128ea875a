"""The interface of a transport: bytes to one peer before a deadline, or an error; and the link between GPUs.

A link moves bytes from GPU to GPU, through NCCL's sends and receives. There is one communicator, on one stream of its
own. The exchange thread alone feeds it, in the order of the plan, so all ranks call it in the same order, which is all
that tells one message from the next: there are no frames there. NCCL itself waits for a peer forever; so no thread
waits for NCCL: it polls, and aborts when time is over.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import PeerError
from ..device import Deadline, Device, Event

_POLL_SECONDS = 50e-6
#: A peer that has closed may have sent all of its part: so long does the rest have to arrive.
_GRACE_SECONDS = 1.0
_ABORT_SECONDS = 0.5
#: So many transfers may be queued at a time: a launch waits, without a bound, while CUDA's own queue is full.
_QUEUED = 64


class Pending(Protocol):
    """A transfer under way."""

    def wait(self, deadline: Deadline) -> None:
        """Return when the bytes have arrived, or have left.

        Raises:
            PeerError: the peer is gone, or the deadline passed.
        """


class Broken(threading.Event):
    """Set when the connection to a peer broke."""

    #: Whether the peer left a note before, and so has nothing more to send.
    noted = False


class Messages(Protocol):
    """Moves bytes between the ranks of one job, in one order for each pair of them."""

    rank: int
    size: int

    def send(self, data: Tensor, to: int) -> Pending:
        """Start to send ``uint8`` data, which must not change before the wait returns."""

    def receive(self, data: Tensor, frm: int) -> Pending:
        """Start to receive exactly ``data.numel()`` bytes into ``data``."""


@dataclass
class Transfer:
    """Sends and receives that start together, of ``uint8`` data on the device.

    Attributes:
        sends: data, and the rank that it is for.
        receives: data, and the rank that it comes from. Between two ranks, the number and the sizes of one's sends are
            those of the other's receives.
        after: events that they follow on.
        done: the event after them, once they are queued.
    """

    sends: list[tuple[Tensor, int]] = field(default_factory=list)
    receives: list[tuple[Tensor, int]] = field(default_factory=list)
    after: list[Event] = field(default_factory=list)
    done: Event = None


class NcclLink:
    """One rank's end of the communicator.

    Args:
        library: has ``groupStart``, ``groupEnd`` and ``NCCL_UINT8``, as ``cupy.cuda.nccl`` does.
        communicator: a ``NcclCommunicator``, or what has its methods.
        where: the device; its stream for moving is the communicator's.
        broken: by peer, whether its connection for tokens is.
    """

    def __init__(
        self,
        library: Any,
        communicator: Any,
        where: Device,
        rank: int,
        size: int,
        broken: Mapping[int, Broken] | None = None,
    ) -> None:
        self.where, self.rank, self.size = where, rank, size
        self._library, self._communicator, self._broken = library, communicator, broken or {}
        self._lock = threading.Lock()  # no communicator may be aborted while it is being called
        self._ending = threading.Lock()  # nor twice
        self._left = (rank - 1) % size
        self._scratch: Tensor | None = None

    def scratch(self, nbytes: int) -> Tensor:
        """Return memory on the device for what arrives; the same for every call, so for one exchange at a time."""
        if self._scratch is None or self._scratch.numel() < nbytes:
            self.where.synchronize()
            self._scratch = self.where.zeros(nbytes, torch.uint8)
            self.where.synchronize()
        return self._scratch[:nbytes]

    def run(self, steps: Iterable[Transfer], deadline: Deadline) -> None:
        """Queue transfers as they are asked for, but no more than a limit before the first of them is done.

        Raises:
            PeerError: a peer is gone, or the deadline passed.
        """
        queued: deque[Event] = deque(maxlen=_QUEUED)
        for transfer in steps:
            if len(queued) == _QUEUED:
                self._wait(queued[0], deadline)
            pairs: list[tuple[Callable[..., None], Tensor, int]] = []
            pairs += ((self._call("send"), *send) for send in transfer.sends)
            pairs += ((self._call("recv"), *receive) for receive in transfer.receives)
            self.start(pairs, [transfer])
            queued.append(transfer.done)

    def start(self, calls: Sequence[tuple[Callable[..., None], Tensor, int]], transfers: Sequence[Transfer]) -> None:
        """Queue the sends and receives of some transfers as one group.

        Raises:
            PeerError: NCCL refuses, as it does when a peer is gone.
        """
        with self.where.moving():
            for transfer in transfers:
                self.where.wait_events(*transfer.after)
            calls = [call for call in calls if call[1].numel()]
            try:
                if calls:
                    self._group(calls)
            except RuntimeError as error:  # NcclError is one
                raise PeerError(self._left, False, f"NCCL: {error}") from None
            for transfer in transfers:
                transfer.done = self.where.record_event()

    def _call(self, name: str) -> Callable[..., None]:
        communicator = self._communicator
        if communicator is None:
            raise PeerError(self._left, False, "this transport was aborted or closed")
        found: Callable[..., None] = getattr(communicator, name)
        return found

    def _group(self, calls: Sequence[tuple[Callable[..., None], Tensor, int]]) -> None:
        stream, kind = self.where.stream(), self._library.NCCL_UINT8
        with self._lock:
            self._call("send")  # it may have been aborted in between
            self._library.groupStart()
            try:
                for call, data, peer in calls:
                    call(data.data_ptr(), data.numel(), kind, peer, stream)
            finally:
                self._library.groupEnd()

    def finish(self, deadline: Deadline) -> None:
        """Return when everything that this thread's stream follows on is done.

        Raises:
            PeerError: a peer is gone, or the deadline passed.
        """
        self._wait(self.where.record_event(), deadline)

    def _wait(self, event: Event, deadline: Deadline) -> None:
        ends: dict[int, Deadline] = {}
        while not self.where.is_done(event):
            self._check()
            for peer, broken in self._broken.items():
                if peer not in ends and broken.is_set():
                    ends[peer] = Deadline(0.0 if broken.noted else _GRACE_SECONDS)
                if peer in ends and ends[peer].passed():
                    raise PeerError(peer, False, "its connection broke during a transfer through NCCL")
            if deadline.passed():
                raise PeerError(self._left, True, "a transfer through NCCL did not end")
            time.sleep(_POLL_SECONDS)
        self._check()

    def _check(self) -> None:
        with self._lock:
            check = self._call("check_async_error")
            try:
                check()
            except RuntimeError as error:
                raise PeerError(self._left, False, f"NCCL: {error}") from None

    def meet(self, deadline: Deadline) -> None:
        """Exchange a byte with every peer: NCCL connects at the first transfer, and waits for that without a bound.

        Raises:
            PeerError: a peer does not come.
        """
        peers = [peer for peer in range(self.size) if peer != self.rank]
        given, taken = (self.where.zeros(self.size, torch.uint8) for _ in range(2))
        sends, receives = ([(data[peer : peer + 1], peer) for peer in peers] for data in (given, taken))
        self.where.synchronize()
        transfer = Transfer(sends, receives)
        self.run([transfer], deadline)
        self.where.wait_events(transfer.done)
        self.finish(deadline)

    def abort(self) -> None:
        """End all transfers, done or not; safe to call twice, and from any thread.

        Not ``destroy``, not even at the end: that waits for transfers, and with them for peers that may be gone.
        """
        with self._ending:
            communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        held = self._lock.acquire(timeout=_ABORT_SECONDS)  # a call that hangs is what an abort is for
        try:
            with contextlib.suppress(RuntimeError):
                communicator.abort()
        finally:
            if held:
                self._lock.release()


class Questions(Protocol):
    """Questions and answers between ranks, beside all messages."""

    def answer(self, call: Callable[[], str]) -> None:
        """Have other ranks' questions answered with what this returns, from a thread of its own, at any time."""

    def ask(self) -> dict[int, tuple[float, str]]:
        """Ask the other ranks, and return what each has answered last, and when, on the monotonic clock.

        It does not wait: what is answered to this is returned later. Ranks that are frozen never answer.
        """


class Transport(Messages, Protocol):
    """Moves bytes between the ranks of one job.

    Messages between two ranks arrive in the order in which they were sent, and are matched with
    receives in the order in which these were posted. Neither call blocks.
    """

    name: str

    @property
    def link(self) -> NcclLink | None:
        """What moves payloads from GPU to GPU; None where they travel as messages, from host memory."""

    @property
    def adds(self) -> Collection[torch.dtype]:
        """The types of numbers that :meth:`add_up` takes."""

    @property
    def aside(self) -> Messages:
        """The same connections for messages with an order to themselves, which never meet the others."""

    @property
    def for_decoding(self) -> Messages:
        """Likewise, for the thread that decodes."""

    def add_up(self, data: Tensor, deadline: Deadline) -> Pending:
        """Start to write the sum over all ranks over ``data``, the same bits on every rank.

        Every rank has to call it, in the same order. It is no message: others go on beside it.
        """

    def abort(self, note: dict[str, Any]) -> None:
        """Break every connection, so that every peer that waits for this rank fails at once.

        Args:
            note: why, as plain data, for the other ranks' messages.
        """

    def notes(self, seconds: float) -> dict[int, dict[str, Any]]:
        """Return the notes of the ranks that aborted, waiting at most ``seconds`` for more.

        Ranks that have ended without one are not waited for, as far as their end is known.
        """

    def on_abort(self, call: Callable[[], None]) -> None:
        """Have this called once another rank has aborted, from a thread of its own; it is a hint, and not certain."""

    def say(self, topic: str, text: str) -> None:
        """Leave word for the other ranks; the last one counts. It takes a moment, and is not certain."""

    def said(self, topic: str) -> dict[int, str]:
        """Return the last word of each rank that has left one, as far as it can be learned in a moment."""

    @property
    def questions(self) -> Questions:
        """What ranks ask each other while they wait."""

    def close(self) -> None:
        """Release the connections after the last exchange."""
