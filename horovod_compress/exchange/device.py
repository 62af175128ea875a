"""Where a bucket lives, what that means for the threads that work on it, and deadlines, before which they wait.

On the CPU a call has done its work when it returns. On a GPU it has only queued it, on the current stream of
the thread that made it; so what one thread queues and another one reads has to be ordered. The rules:

- the training thread offers on the stream that it is on, and that stream is noted;
- the exchange thread and the decoding thread have a stream of their own each;
- an *event* is a point of a stream: whoever takes over from it lets its own stream go on *after* the event,
  which stops no thread; only before the CPU reads what a stream writes does a thread *wait* for an event.

Every call here is made by the reducer and by what it owns, and on the CPU does nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import ConfigError, ExchangeError
from ..ops.legality import stream_of

#: How long a thread sleeps between two looks at an event: a copy of a chunk takes about as long.
_POLL_SECONDS = 20e-6

#: What :func:`of` makes.
KINDS = ("cpu", "cuda")
#: A point of a stream; None on the CPU.
Event = Any


class Device:
    """The CPU; other devices override what they have to do."""

    #: Whether payloads there are exchanged from copies in host memory, as the CPU cannot read them.
    is_accelerator: ClassVar[bool] = False

    def __init__(self, name: str = "cpu") -> None:
        self.name, self.where = name, torch.device(name)

    # ---- memory ----

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the device."""
        return torch.zeros(count, dtype=dtype, device=self.where)

    def host_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return memory of the host that the device copies to and from."""
        return torch.zeros(count, dtype=dtype, device="cpu")

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let the memory of tensors that another thread allocated live until the work of our threads on it is done."""

    # ---- threads ----

    def offering(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the training thread hands gradients to a codec, whatever device it is on."""
        return contextlib.nullcontext()

    def exchanging(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a thread does the exchange thread's work."""
        return contextlib.nullcontext()

    def decoding(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a thread decodes."""
        return contextlib.nullcontext()

    def moving(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which a thread queues transfers between devices."""
        return contextlib.nullcontext()

    def stream(self) -> int:
        """Return the address of the stream that this thread queues on."""
        return 0

    # ---- order ----

    def record_event(self) -> Event:
        """Record what this thread has queued so far."""

    def record_in(self, events: dict[int, Event]) -> None:
        """Record what this thread has queued so far, in a table with one event for each stream."""

    def note_stream(self, streams: dict[int, Any]) -> None:
        """Note the stream that this thread queues on, in a table of streams by their addresses."""

    def follow(self, streams: dict[int, Any]) -> None:
        """Let what this thread queues from now on run after all that is queued on some streams by now."""

    def wait_events(self, *events: Event) -> None:
        """Let what this thread queues from now on run after some events; None stands for no event."""

    def is_done(self, event: Event) -> bool:
        """Return whether what was queued before an event is done."""
        return True

    def wait(self, event: Event, deadline: Deadline) -> None:
        """Wait until what was queued before an event is done.

        Raises:
            ExchangeError: it is not before the deadline.
        """

    def copy(self, into: Tensor, frm: Tensor) -> None:
        """Queue a copy between the device and memory of :meth:`host_zeros`."""
        into.copy_(frm)

    def synchronize(self) -> None:
        """Wait until nothing is queued: between steps, before memory changes hands."""


class CudaDevice(Device):
    """One CUDA device, with a stream for the exchange thread, one for decoding and one for transfers."""

    is_accelerator = True

    def __init__(self, name: str) -> None:
        super().__init__(name)
        if self.where.index is None:
            self.where = torch.device("cuda", torch.cuda.current_device())
        self._exchange, self._decode, self._move = (torch.cuda.Stream(self.where) for _ in range(3))
        self._followed: dict[int, Event] = {}  # the last event that each stream was let follow on, by its address

    def host_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        # Copies from and to other memory of the host stop the thread that queues them.
        return torch.zeros(count, dtype=dtype, pin_memory=True, device="cpu")

    def keep(self, tensors: Iterable[Tensor]) -> None:
        # Else the allocator hands the memory out again as soon as the stream that it comes from gets there.
        for tensor in tensors:
            tensor.record_stream(self._exchange)
            tensor.record_stream(self._decode)

    def offering(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.where)

    def exchanging(self) -> contextlib.AbstractContextManager[Any]:
        return self._on(self._exchange)

    def decoding(self) -> contextlib.AbstractContextManager[Any]:
        return self._on(self._decode)

    def moving(self) -> contextlib.AbstractContextManager[Any]:
        return self._on(self._move)

    def stream(self) -> int:
        return stream_of(self.where.index)

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Any:
        # Device and stream are chosen for each thread, and kernels look at both.
        with torch.cuda.device(self.where), torch.cuda.stream(stream):
            yield

    def _current(self) -> Any:
        return torch.cuda.current_stream(self.where)

    def record_event(self) -> Event:
        event = torch.cuda.Event()
        event.record(self._current())
        return event

    def record_in(self, events: dict[int, Event]) -> None:
        # One event for each stream does: what comes later on a stream includes what came before.
        events[self.stream()] = self.record_event()

    def note_stream(self, streams: dict[int, Any]) -> None:
        if (stream := self.stream()) not in streams:
            streams[stream] = self._current()

    def follow(self, streams: dict[int, Any]) -> None:
        mine = self.stream()
        for address, stream in streams.items():
            if address != mine:
                event = torch.cuda.Event()
                event.record(stream)
                self._current().wait_event(event)

    def wait_events(self, *events: Event) -> None:
        # Hundreds of results are fetched after one event, on one stream. No event is recorded twice.
        for event in events:
            if event is not None and self._followed.get(stream := self.stream()) is not event:
                self._current().wait_event(event)
                self._followed[stream] = event

    def is_done(self, event: Event) -> bool:
        return bool(event.query())

    def wait(self, event: Event, deadline: Deadline) -> None:
        # Not event.synchronize(), which knows no bound: a peer may have left a transfer on this stream forever.
        while not self.is_done(event):
            if deadline.passed():
                raise ExchangeError(
                    f"{self.name} did not finish its work on a bucket within {deadline.seconds:g} s; if it is only "
                    f"busy, raise timeout="
                )
            time.sleep(_POLL_SECONDS)

    def copy(self, into: Tensor, frm: Tensor) -> None:
        into.copy_(frm, non_blocking=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)


def check(names: Iterable[str]) -> list[str]:
    """Return the devices of a rank's gradients, each once.

    Raises:
        ConfigError: there are several GPUs among them.
    """
    found = sorted(set(names))
    if sum(name != "cpu" for name in found) > 1:
        raise ConfigError(f"the gradients of a rank should be on one GPU, these are on {', '.join(found)}")
    return found


def of(name: str) -> Device:
    """Return the device of a name, such as "cpu" or "cuda:1"."""
    return Device() if name == "cpu" else CudaDevice(name)


class Deadline:
    """A point on the monotonic clock; each wait uses what is left of it."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that remain, never less than zero."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self.left() == 0.0

    def extended(self, seconds: float) -> Deadline:
        """Return one that leaves so many seconds at least; in words it is as long as this one."""
        longer = Deadline(self.seconds)
        longer._end = max(self._end, time.monotonic() + seconds)
        return longer
