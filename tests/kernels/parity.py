"""One comparison of a kernel on the CPU with the same kernel's CUDA text, on a GPU or emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks import single
from horovod_compress.ops import legality

from . import emulator
from .support import GUARD, POISON, differences, flat, poison

#: Of memory that CUDA gives, in bytes.
ALIGNED = 256
#: Shifts of the arguments' memory, in elements: every call has others.
_shifts = count()


@dataclass(frozen=True)
class Target:
    """Where the CUDA text runs."""

    name: str
    device: str

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Let the kernels of CPU tensors be the emulated ones, where that is the target."""
        if self.name == "cuda":
            yield
            return
        before, legality.CPU = legality.CPU, emulator.load()
        try:
            yield
        finally:
            legality.CPU = before

    def same(self, name: str | Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Run a kernel, or what calls some, on the CPU and on the target with equal arguments; return what it returned.

        Nothing may differ, and no memory around the arguments may change.
        """
        shift = next(_shifts) % 9
        given, run = [*arguments, *options.values()], single.named(name) if isinstance(name, str) else name
        results: list[Any] = []
        finals: list[Memory] = []
        for device in ("cpu", self.device):
            memory = Memory(given, device, shift)
            mine = memory.placed(given)
            named = dict(zip(options, mine[len(arguments) :], strict=True))
            with self.chosen() if finals else nullcontext():
                results.append(integers(run(*mine[: len(arguments)], **named)))
            finals.append(memory.on_host())
            assert finals[-1].intact(), f"{name} wrote outside its arguments on {device}"
        assert results[0] == results[1], f"{name} returned {results[0]} on the CPU, {results[1]} on {self.name}"
        wrong = finals[0].differences(finals[1])
        assert not any(wrong), f"{name}: elements that differ, by argument: {wrong}"
        return results[0]


class Memory:
    """Copies of tensors on a device, each at a misalignment of its own, with poison around it.

    They are one piece of memory, which is copied there and back at once: where several tests share a GPU, each wait for
    it takes a millisecond.
    """

    def __init__(self, given: list[Any], device: str, shift: int) -> None:
        tensors = [value for value in flat(given) if isinstance(value, Tensor)]
        self._where: list[tuple[int, int, torch.dtype]] = []
        end = 0
        for number, tensor in enumerate(tensors):
            start = end + (GUARD + shift * (2 * number + 1) % GUARD) * tensor.itemsize
            self._where.append((start, start + tensor.nbytes, tensor.dtype))
            end = -(-(start + tensor.nbytes + GUARD * tensor.itemsize) // ALIGNED) * ALIGNED
        self._bytes = poison(end, torch.uint8)
        for tensor, view in zip(tensors, self._views(), strict=True):
            view.copy_(tensor)
        self._bytes = self._bytes.to(device)

    def placed(self, given: list[Any]) -> list[Any]:
        """Return the arguments with these copies as their tensors."""
        views = self._views()

        def place(value: Any) -> Any:
            if isinstance(value, list):
                return [place(part) for part in value]
            return next(views) if isinstance(value, Tensor) else value

        return [place(value) for value in given]

    def on_host(self) -> Memory:
        """Return this memory as the CPU can read it."""
        found = copy(self)
        found._bytes = self._bytes.cpu()
        return found

    def intact(self) -> bool:
        """Return whether all around the tensors is as it was."""
        ends = [0, *(end for _, end, _ in self._where)]
        starts = [*(start for start, _, _ in self._where), self._bytes.numel()]
        around = torch.cat([self._bytes[end:start] for end, start in zip(ends, starts, strict=True)])
        return bool((around == POISON).all())

    def differences(self, other: Memory) -> list[int]:
        """Return how many elements of each tensor differ from those of another."""
        if torch.equal(self._bytes, other._bytes):  # most often: to look at each element takes long
            return []
        return [differences(a, b) for a, b in zip(self._views(), other._views(), strict=True)]

    def _views(self) -> Iterator[Tensor]:
        return (self._bytes[start:end].view(dtype) for start, end, dtype in self._where)


def integers(result: Any) -> Any:
    if isinstance(result, list):
        return result[0] if len(result) == 1 else result
    if isinstance(result, Tensor) and result.dim() and result.numel() != 1:
        return result.tolist()
    if isinstance(result, tuple):
        return tuple(int(part) for part in result)
    return None if result is None else int(result)
