"""A model with the parameters of a real one, whose compute is simulated by sleeping.

What is real: number, names, shapes and backward order of the gradients, the hooks that fire for
each of them, and everything that Horovod or a compression does. What is simulated: the time that
an accelerator would compute. A sleeping rank leaves its core free, as a host whose accelerator is
busy does; work that a hook does in the backward thread delays the layers behind it, as it would
delay their launch. The time is a chosen number of milliseconds, a third of it forward, spread over
the layers as their multiply-adds are; gradients are made before and handed out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .models import Table
from .prediction import FORWARD_SHARE

LEAST_SLEEP = 1e-4  # seconds; a shorter time is added to the next layer's
TILE = 1 << 20  # elements after which the random gradient repeats


class ComputeClock:
    """The clock of the stand-in compute: sleeps, and carries what it slept too long to the next layer.

    Attributes:
        on: whether compute takes time at all.
        budget: seconds to sleep in a step. It is less than the step is to take, as the walk through
            the layers takes time of its own; :func:`calibrate` finds it.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = self.budget = seconds
        self.on = True
        self._owed = 0.0

    def begin(self) -> None:
        """Start a step: nothing is owed."""
        self._owed = 0.0

    def spend(self, share: float) -> None:
        """Take a share of the budget's time."""
        if not self.on:
            return
        self._owed += share * self.budget
        if self._owed >= LEAST_SLEEP:
            began = time.perf_counter()
            time.sleep(self._owed)
            self._owed -= time.perf_counter() - began


class Gradients:
    """The gradients of all tensors in one flat buffer, refilled between steps from a random tile.

    Reducing overwrites gradients in place, and a second copy to refill from would cost as much
    memory as the model; so the values repeat every ``TILE`` elements.

    Args:
        tile: at most ``TILE`` float32 elements, this rank's own.
    """

    def __init__(self, table: Table, tile: Tensor) -> None:
        self._buffer, self._tile = torch.empty(table.count, device=tile.device), tile
        parts = self._buffer.split([tensor.count for tensor in table.tensors])
        #: By tensor.
        self.views = {one.name: part.view(one.shape) for one, part in zip(table.tensors, parts, strict=True)}

    def refill(self) -> None:
        """Write this rank's values again; not in the timed part of a step."""
        for start in range(0, self._buffer.numel(), len(self._tile)):
            part = self._buffer[start : start + len(self._tile)]
            part.copy_(self._tile[: len(part)])


@dataclass
class _LayerWork:
    """One layer: its share of the whole compute, its gradients, and the parameters that they are of, last ones first.

    In backward a bias comes before its weight.
    """

    share: float
    clock: ComputeClock
    gradients: list[Tensor]
    parameters: list[nn.Parameter]


class _Pass(torch.autograd.Function):
    """The passes through a layer: they take its time, and in backward hand out its gradients."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, layer: _LayerWork, *parameters: Tensor) -> Tensor:
        ctx.layer = layer
        layer.clock.spend(layer.share * FORWARD_SHARE)
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, signal: Tensor) -> tuple[Tensor | None, ...]:
        layer: _LayerWork = ctx.layer
        layer.clock.spend(layer.share * (1 - FORWARD_SHARE))
        # New tensors over the same memory, which autograd takes without a copy.
        return (signal, None, *(gradient.detach() for gradient in layer.gradients))


class SyntheticModel(nn.Module):
    """A model by its table; the forward pass takes and returns one number.

    Args:
        memory: flat, of all parameters; models may share it, as no parameter is changed.
    """

    def __init__(self, table: Table, gradients: Gradients, clock: ComputeClock, memory: Tensor) -> None:
        super().__init__()
        self._clock, self._layers = clock, []
        total = sum(tensor.macs for tensor in table.tensors)
        start = 0
        for layer in table.layers():
            work = _LayerWork(layer.macs / total, clock, [], [])
            for tensor in layer.tensors:
                parameter = nn.Parameter(memory[start : start + tensor.count].view(tensor.shape))
                start += tensor.count
                work.parameters.insert(0, parameter)
                work.gradients.insert(0, gradients.views[tensor.name])
                self._register(tensor.name, parameter)
            self._layers.append(work)

    def _register(self, name: str, parameter: nn.Parameter) -> None:
        """Register a parameter under its dotted name, making the modules in between."""
        root: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            if part not in dict(root.named_children()):
                root.add_module(part, nn.Module())
            root = root.get_submodule(part)
        root.register_parameter(last, parameter)

    def forward(self, signal: Tensor) -> Tensor:
        self._clock.begin()
        for layer in self._layers:
            signal = _Pass.apply(signal, layer, *layer.parameters)  # type: ignore[no-untyped-call]
        return signal.sum()


def untouched_memory(count: int) -> Tensor:
    """Return zeros that take no memory until they are written, which must never happen."""
    return torch.from_numpy(np.zeros(count, dtype=np.float32))


def calibrate(pace: ComputeClock, step: Callable[[], float]) -> float:
    """Set the budget so that a step without exchange takes ``pace.seconds``.

    Args:
        step: takes a step and returns its seconds.

    Returns:
        The seconds that three steps took at last, the median.
    """
    for _ in range(3):
        found = statistics.median(step() for _ in range(3))
        pace.budget = max(0.0, pace.budget + pace.seconds - found)
    return statistics.median(step() for _ in range(3))
