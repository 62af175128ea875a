"""The ranks of a process group, for the commands that check and measure.

As a module, it is a rank that ``hvd-compress verify`` has started itself, with the environment that ``torchrun`` gives
one. As under ``torchrun``, the process that starts the ranks has the store: it stays when a rank dies.
"""

from __future__ import annotations

from collections.abc import Collection
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
from .. import local_ranks, selftest
from ..local_ranks import End, Look
from ..ranks import PATIENCE, Training, usual_optimizer
from ..startup import Wrap, as_it_is
from .compression import Compression
from .job import TorchJob

_MODULE = "horovod_compress.fronts.torch_dist.ranks"
_HOST = "127.0.0.1"
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

    def undivided(self) -> TorchRanks:
        return self

    def gather(self, value: Any, name: str, seconds: float = PATIENCE) -> list[Any]:
        return TorchJob(None).gather(value, Gathering(name, seconds))

    def barrier(self) -> None:
        dist.barrier()

    def slowest(self, seconds: float) -> float:
        mine = torch.tensor([seconds], dtype=torch.float64, device="cpu")
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        return float(mine)

    def mean(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor.div_(self.size))

    def mean_in_fp16(self, tensor: Tensor) -> None:
        payload = tensor.to(torch.float16).div_(self.size)
        dist.all_reduce(payload)
        tensor.copy_(payload)

    def train(
        self,
        model: nn.Module,
        method: MethodName | Codec,
        wrap: Wrap = as_it_is,
        optimizer: Optimizer | None = None,
        match_norm: bool = True,
        **options: Any,
    ) -> Training:
        compression = Compression(method, model.named_parameters(), options, TorchJob(None), wrap)
        optimizer = optimizer or usual_optimizer(model)
        called = compression.register(DistributedDataParallel(model), optimizer, match_norm=match_norm)
        return Training(compression, optimizer, called)

    def exchange(self, training: Training, parameter: nn.Parameter, grad: Tensor) -> None:
        assert isinstance(training.compression, Compression)
        training.compression._exchange_alone(grad)


def run_local(
    world: int,
    what: Any,
    seconds: float,
    victims: Collection[int] = (),
    look: Look = lambda left: None,
    module: str = _MODULE,
) -> list[End]:
    """Run a module, this one, as every rank of a job on this machine; see :func:`..local_ranks.run`."""
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
    common = {
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    own = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return local_ranks.run(module, own, what, seconds, victims, look)


if __name__ == "__main__":
    selftest.serve(begin)
