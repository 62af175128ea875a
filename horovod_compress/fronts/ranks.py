"""The ranks of a job as commands see them, and what an exchange of gradients costs there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..codecs.base import Codec
from ..known import MethodName
from .startup import Wrap, as_it_is

#: Seconds for what is to succeed, on a machine that may be busy.
PATIENCE = 30.0


class Training(NamedTuple):
    """A model under a compression: its optimizer, and what is called in place of the model."""

    compression: Any  # the front's own Compression
    optimizer: Any
    called: Callable[..., Any]


def usual_optimizer(model: nn.Module) -> Optimizer:
    """Return what commands train with if nothing else is asked for."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


class Ranks(Protocol):
    """The ranks of a job that the framework has started."""

    #: Of the framework, as timings are named.
    name: str

    @property
    def rank(self) -> int:
        """Return the number of this rank."""

    @property
    def size(self) -> int:
        """Return how many there are."""

    def undivided(self) -> Ranks:
        """Return ranks of which each has all parameters, and exchanges with all others; every rank has to ask."""

    def gather(self, value: Any, name: str, seconds: float = PATIENCE) -> list[Any]:
        """Return plain data of every rank, in rank order."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' numbers."""

    def mean(self, tensor: Tensor) -> None:
        """Take the mean over ranks in place, as the framework does."""

    def mean_in_fp16(self, tensor: Tensor) -> None:
        """Take the mean over ranks in place, as the framework's own fp16 compression does."""

    def train(
        self,
        model: nn.Module,
        method: MethodName | Codec,
        wrap: Wrap = as_it_is,
        optimizer: Optimizer | None = None,
        match_norm: bool = True,
        **options: Any,
    ) -> Training:
        """Begin a training with a method; by SGD, if nothing else is given.

        Args:
            wrap: returns the transport of the compression, given the one to the other ranks.
            match_norm: an option of ``attach()``.
        """

    def exchange(self, training: Training, parameter: nn.Parameter, grad: Tensor) -> None:
        """Exchange one gradient and wait for its result, without a backward pass."""


# ---- what compression could save ----

_WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """The time from a barrier until the slowest rank has its result, in seconds."""

    name: str
    median: float
    spread: float  # between the quartiles

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "median_seconds": self.median, "spread_seconds": self.spread}


def measure(ranks: Ranks, elements: int, repeat: int, method: MethodName, options: dict[str, Any]) -> list[Timing]:
    """Time the mean of one float32 tensor over the ranks: the framework's own, this package's, and with a method.

    The contestants take turns. Every rank has to call this.

    Returns:
        The framework's own all-reduce in float32, the same through its fp16 compression, ``none``, which
        sends float32 as the method would send its payload, and last the method.

    Raises:
        ConfigError: the method or an option is not known.
    """
    # As square as can be: methods that look at rows or matrices get some.
    rows = max(1, round(elements**0.5))
    shape = (rows, max(1, elements // rows))
    source = torch.randn(shape, generator=torch.Generator().manual_seed(ranks.rank), device="cpu")
    grad = torch.empty_like(source)
    contestants: dict[str, Callable[[], object]] = {
        f"{ranks.name} fp32": lambda: ranks.mean(grad),
        f"{ranks.name} fp16": lambda: ranks.mean_in_fp16(grad),
    }
    both: dict[MethodName, dict[str, Any]] = {"none": {}, method: options}
    trainings = []
    for ours, given in both.items():
        model, parameter = nn.Module(), nn.Parameter(torch.zeros_like(grad))
        model.register_parameter(f"headroom_{ours}", parameter)
        # One bucket; and nothing is to choose not to compress it. No optimizer uses the results, which an engine that
        # matches norms would take for a program that drops them.
        trainings.append(ranks.train(model, ours, match_norm=False, schedule="single", **given))
        contestants[ours] = partial(ranks.exchange, trainings[-1], parameter, grad)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(_WARM_UP + repeat):
        for name, run in contestants.items():
            grad.copy_(source)
            ranks.barrier()
            began = time.perf_counter()
            run()
            taken = ranks.slowest(time.perf_counter() - began)
            if number >= _WARM_UP:
                seconds[name].append(taken)
    for training in trainings:
        training.compression.close()
    quartiles = {name: statistics.quantiles(values, n=4, method="inclusive") for name, values in seconds.items()}
    return [Timing(name, middle, third - first) for name, (first, middle, third) in quartiles.items()]
