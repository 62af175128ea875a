"""What an exchange of gradients costs in this job, and what compression could save of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from .compression import Compression

_WARM_UP = 2


@dataclass(frozen=True)
class Timing:
    """The time from a barrier until the slowest rank has its result, in seconds."""

    name: str
    median: float
    spread: float  # between the quartiles

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "median_seconds": self.median, "spread_seconds": self.spread}


def measure(elements: int, repeat: int, method: str, options: dict[str, Any]) -> list[Timing]:
    """Time the mean of one float32 tensor over the ranks: Horovod's own, this package's, and with a method.

    The contestants take turns. Every rank has to call this, after ``hvd.init()``.

    Returns:
        Horovod's own all-reduce in float32, the same through its fp16 compression, ``none``, which
        sends float32 as the method would send its payload, and last the method.

    Raises:
        ConfigError: the method or an option is not known.
    """
    # As square as can be: methods that look at rows or matrices get some.
    rows = max(1, round(elements**0.5))
    shape = (rows, max(1, elements // rows))
    source, grad = torch.randn(shape, generator=torch.Generator().manual_seed(hvd.rank())), torch.empty(shape)
    both: dict[str, dict[str, Any]] = {"none": {}, method: options}
    ours = {name: _Ours(grad, name, given) for name, given in both.items()}
    contestants: dict[str, Callable[[], object]] = {
        "horovod fp32": lambda: hvd.allreduce_(grad, name="headroom.fp32"),
        "horovod fp16": lambda: _through_fp16(grad),
    }
    contestants |= {name: one.run for name, one in ours.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(_WARM_UP + repeat):
        for name, run in contestants.items():
            grad.copy_(source)
            taken = _slowest(run)
            if number >= _WARM_UP:
                seconds[name].append(taken)
    for one in ours.values():
        one.close()
    return [_timing(name, values) for name, values in seconds.items()]


def _through_fp16(grad: Tensor) -> None:
    """Take the mean in place through Horovod's fp16, which it does to a gradient of the optimizer."""
    payload, _ = hvd.Compression.fp16.compress(grad)
    grad.copy_(hvd.allreduce_(payload, name="headroom.fp16"))


class _Ours:
    """The mean of one gradient through the optimizer of a model with one parameter."""

    def __init__(self, grad: Tensor, method: str, options: dict[str, Any]) -> None:
        self._grad, self._parameter = grad, nn.Parameter(torch.zeros_like(grad))
        named = [(f"headroom.{method}", self._parameter)]
        # One bucket; and nothing is to choose not to compress it.
        self._compression = Compression.create(method, named, schedule="single", **options)
        plain = torch.optim.SGD([self._parameter], lr=0.0)
        self._optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=self._compression)
        self._compression.attach(self._optimizer)

    def run(self) -> None:
        self._parameter.grad = self._grad
        self._optimizer._synchronized = False  # the step() that would follow is not measured
        self._optimizer.synchronize()

    def close(self) -> None:
        self._compression.close()


def _slowest(run: Callable[[], object]) -> float:
    hvd.barrier()
    began = time.perf_counter()
    run()
    mine = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    return float(hvd.allreduce(mine, name="headroom.seconds", op=hvd.Max))


def _timing(name: str, values: list[float]) -> Timing:
    first, middle, third = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(name, middle, third - first)
