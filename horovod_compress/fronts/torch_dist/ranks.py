"""The ranks of a process group, for the commands that check and measure."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ...codecs.base import Codec
from ...engine.job import Gathering
from ...known import MethodName
from ..common.ranks import PATIENCE, Training
from .compression import Compression
from .job import TorchJob

_LR = 0.01
_START = timedelta(minutes=5)  # hosts of a cluster start ranks at different times


def begin() -> TorchRanks:
    """Start torch.distributed for a command, with what a launcher has put into the environment."""
    dist.init_process_group("gloo", timeout=_START)
    return TorchRanks()


class TorchRanks:
    """The ranks of the default process group, which has to be there."""

    name = "ddp"

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return dist.get_world_size()

    def gather(self, value: Any, name: str, seconds: float = PATIENCE) -> list[Any]:
        return TorchJob(None).gather(value, Gathering(name, seconds))

    def barrier(self) -> None:
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return float(mine)

    def mean(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor.div_(self.size))

    def mean_in_fp16(self, tensor: Tensor) -> None:
        payload = tensor.to(torch.float16).div_(self.size)
        dist.all_reduce(payload)
        tensor.copy_(payload)

    def train(
        self, model: nn.Module, method: MethodName | Codec, optimizer: Optimizer | None = None, **options: Any
    ) -> Training:
        compression = Compression.create(method, list(model.named_parameters()), **options)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=_LR)
        return Training(compression, optimizer, compression.register(DistributedDataParallel(model), optimizer))

    def exchange(self, training: Training, parameter: nn.Parameter, grad: Tensor) -> None:
        assert isinstance(training.compression, Compression)
        training.compression._exchange_alone(grad)
