"""A device whose payloads are staged, made of the CPU: the reducer's code for GPUs, without one.

Copies are done when somebody waits for them, and not before: until then there is rubbish where they go. So a
wait that is missing shows in the results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from horovod_compress.engine.bucket.round import Prelude
from horovod_compress.exchange import device
from horovod_compress.exchange.device import Deadline, Device

_RUBBISH = 0xA5


class FakeAccelerator(Device):
    """The CPU as if it were another device."""

    is_accelerator = True

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._queued: list[tuple[Tensor, Tensor]] = []
        self._done = 0
        #: Bytes that were copied.
        self.copied = 0

    def record_event(self) -> int:
        with self._lock:
            return len(self._queued)

    def record_in(self, events: dict[int, int]) -> None:
        events[threading.get_ident()] = self.record_event()

    def wait_events(self, *events: int | None) -> None:
        with self._lock:
            for event in events:
                while event is not None and self._done < event:
                    self._copy_next()

    def wait(self, event: int, deadline: Deadline) -> None:
        self.wait_events(event)

    def copy(self, into: Tensor, frm: Tensor) -> None:
        into.view(torch.uint8).fill_(_RUBBISH)
        with self._lock:
            self._queued.append((into, frm))

    def _copy_next(self) -> None:
        into, frm = self._queued[self._done]
        self._queued[self._done] = (into[:0], frm[:0])  # tests of many steps must not keep all of them
        into.copy_(frm)
        self.copied += frm.nbytes
        self._done += 1


@contextmanager
def everything_on_accelerator(make: Callable[[], FakeAccelerator] = FakeAccelerator) -> Iterator[None]:
    """Let reducers that are made now stage the payloads of CPU gradients.

    Args:
        make: makes a reducer's device.
    """
    run = Prelude.run

    def finished(prelude: Prelude, *arguments: Any) -> Any:
        """Kernels of the same thread follow on its copies; here they would run at once."""
        bad = run(prelude, *arguments)
        where = prelude.staging.device if prelude.staging else Device()
        where.wait_events(where.record_event())
        return bad

    a_new_one = mock.patch.object(device, "of", lambda name: make())  # noqa: PT008  one for each call
    with a_new_one, mock.patch.object(Prelude, "run", finished):
        yield
