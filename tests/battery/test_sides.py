"""No kernel is given memory of the device together with memory of the host, while payloads are staged.

On the CPU that would go unnoticed, and on a GPU it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from horovod_compress.exchange import wire
from horovod_compress.ops.dispatch import run
from horovod_compress.ops.table import TABLE
from tests.battery.cases import each_case
from tests.support.accelerator import FakeAccelerator, everything_on_accelerator
from tests.support.local import random_grads, spec
from tests.support.samples import Sample
from tests.support.turns import decode_in_parts

TENSORS = [spec("a", 70, 336), spec("b", 5), spec("c", 9001)]
DEVICE, HOST = "device", "host"


class Sided(FakeAccelerator):
    """Knows which memory is whose."""

    spans: ClassVar[list[tuple[int, int, str]]] = []

    @classmethod
    def note_memory(cls, tensor: Tensor, side: str) -> Tensor:
        cls.spans.append((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, side))
        return tensor

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return self.note_memory(super().zeros(count, dtype), DEVICE)

    def host_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return self.note_memory(super().host_zeros(count, dtype), HOST)


def side_of(tensor: Tensor) -> str | None:
    """Return whose memory it is, None for what neither has allocated: gradients, and what codecs make in between."""
    at = tensor.data_ptr()
    return next((side for start, end, side in Sided.spans if tensor.nbytes and start <= at < end), None)


def tensors(given: Any) -> Iterator[Tensor]:
    """Yield the tensors among a kernel's arguments, and in their lists."""
    if isinstance(given, Tensor):
        yield given
    for part in given if isinstance(given, (list, tuple)) else ():
        yield from tensors(part)


@contextmanager
def watched() -> Iterator[list[str]]:
    """Yield what kernels are given that they should not be."""
    found: list[str] = []
    before = {row.name: getattr(run, row.name) for row in TABLE if not row.on_host}

    def watching(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            sides = {side_of(tensor) for tensor in tensors([arguments, list(options.values())])}
            if {DEVICE, HOST} <= sides:
                found.append(name)
            return real(*arguments, **options)

        return watched

    buffer = wire.FrameBuffer.__init__

    def framed(self: wire.FrameBuffer, capacity: int) -> None:
        buffer(self, capacity)
        Sided.note_memory(self.memory, HOST)

    try:
        for name, real in before.items():
            setattr(run, name, watching(name, real))
        wire.FrameBuffer.__init__ = framed  # type: ignore[method-assign]
        yield found
    finally:
        wire.FrameBuffer.__init__ = buffer  # type: ignore[method-assign]
        for name, real in before.items():
            setattr(run, name, real)
        Sided.spans.clear()


@each_case()
def test_every_kernel_works_on_one_side(case: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_in_parts(monkeypatch)
    for exchange in case.exchanges():
        with everything_on_accelerator(Sided), watched() as found:
            with case.fleet(2, TENSORS, exchange=exchange) as fleet:
                for step in range(3):
                    fleet.step(random_grads(2, TENSORS, seed=step))
                assert {side for _, _, side in Sided.spans} == {DEVICE, HOST}
        assert not found, found[:3]


def test_the_watch_sees_what_it_must() -> None:
    """The positive control."""
    from horovod_compress import ops

    with watched() as found:
        where = Sided()
        ops.dense_add(where.zeros(8, torch.float32), where.zeros(8, torch.float32))
        assert not found
        ops.dense_add(where.zeros(8, torch.float32), where.host_zeros(8, torch.float32))
        assert len(found) == 1
