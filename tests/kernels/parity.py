"""One comparison of a kernel on the CPU with the same kernel's CUDA text, on a GPU or emulated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks import single
from horovod_compress.ops import legality

from . import emulator
from .support import GUARD, POISON, differences, flat, poison

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

    def same(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Run a kernel on the CPU and on the target with equal arguments, and return what it returned.

        Nothing may differ, and no memory around the arguments may change.
        """
        shift = next(_shifts) % 9
        given, run = [*arguments, *options.values()], single.named(name)
        results, finals = [], []
        for device in ("cpu", self.device):
            placed: list[Placed] = []
            mine = [place(value, device, shift, placed) for value in given]
            named = dict(zip(options, mine[len(arguments) :], strict=True))
            if device == self.device and finals:
                with self.chosen():
                    result = run(*mine[: len(arguments)], **named)
            else:
                result = run(*mine[: len(arguments)], **named)
            results.append(integers(result))
            finals.append([value.cpu() for value in flat(mine) if isinstance(value, Tensor)])
            assert all(part.intact() for part in placed), f"{name} wrote outside its arguments on {device}"
        assert results[0] == results[1], f"{name} returned {results[0]} on the CPU, {results[1]} on {self.name}"
        wrong = [differences(a, b) for a, b in zip(*finals, strict=True)]
        assert not any(wrong), f"{name}: elements that differ, by argument: {wrong}"
        return results[0]


class Placed:
    """A copy of a tensor on a device, at a misalignment, with poison around it."""

    def __init__(self, tensor: Tensor, device: str, shift: int) -> None:
        before, size = GUARD + shift, tensor.numel()
        memory = poison(before + size + GUARD, tensor.dtype).to(device)
        self.view = memory[before : before + size]
        self.view.copy_(tensor)
        self._outside = (memory[:before], memory[before + size :])

    def intact(self) -> bool:
        return all(bool((part.view(torch.uint8) == POISON).all()) for part in self._outside)


def place(value: Any, device: str, shift: int, placed: list[Placed]) -> Any:
    """Return an argument on a device; every tensor has a misalignment of its own."""
    if isinstance(value, list):
        return [place(part, device, shift, placed) for part in value]
    if not isinstance(value, Tensor):
        return value
    placed.append(Placed(value, device, shift * (2 * len(placed) + 1) % GUARD))
    return placed[-1].view


def integers(result: Any) -> Any:
    if isinstance(result, list):
        return result[0] if len(result) == 1 else result
    if isinstance(result, Tensor) and result.dim() and result.numel() != 1:
        return result.tolist()
    if isinstance(result, tuple):
        return tuple(int(part) for part in result)
    return None if result is None else int(result)
