"""Horovod's ranks, for the commands that check and measure."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...codecs.base import Codec
from ...engine.job import Gathering
from ...known import MethodName
from ..common.ranks import PATIENCE, Training
from .compression import Compression
from .job import HorovodJob

_LR = 0.01


def begin() -> HorovodRanks:
    """Start Horovod for a command: one rank where no launcher has started several."""
    hvd.init()
    return HorovodRanks()


class HorovodRanks:
    """The ranks of a Horovod job, which has to run."""

    name = "horovod"

    @property
    def rank(self) -> int:
        return int(hvd.rank())

    @property
    def size(self) -> int:
        return int(hvd.size())

    def gather(self, value: Any, name: str, seconds: float = PATIENCE) -> list[Any]:
        return HorovodJob(hvd.global_process_set).gather(value, Gathering(name, seconds))

    def barrier(self) -> None:
        hvd.barrier()

    def slowest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64)
        return float(hvd.allreduce(mine, name="ranks.seconds", op=hvd.Max))

    def mean(self, tensor: Tensor) -> None:
        hvd.allreduce_(tensor, name="ranks.fp32")

    def mean_in_fp16(self, tensor: Tensor) -> None:
        payload, _ = hvd.Compression.fp16.compress(tensor)
        tensor.copy_(hvd.allreduce_(payload, name="ranks.fp16"))

    def train(
        self, model: nn.Module, method: MethodName | Codec, optimizer: Optimizer | None = None, **options: Any
    ) -> Training:
        named = list(model.named_parameters())
        compression = Compression.create(method, named, **options)
        plain = optimizer or torch.optim.SGD(model.parameters(), lr=_LR)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression)
        return Training(compression, compression.attach(optimizer), model)

    def exchange(self, training: Training, parameter: nn.Parameter, grad: Tensor) -> None:
        parameter.grad = grad
        training.optimizer._synchronized = False  # the step() that would follow is not measured
        training.optimizer.synchronize()
