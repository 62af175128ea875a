"""The ranks of a process group as two dimensions, for ``hvd-compress verify``: replicas of a model that is divided.

As a module, it is a rank that ``verify`` has started itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from ...codecs.base import Codec
from ...known import MethodName
from .. import selftest
from ..ranks import Training, usual_optimizer
from ..startup import Wrap, as_it_is
from ..torch_dist.ranks import TorchRanks, begin as begin_torch, run_local as run_torch
from .compression import Compression
from .grid import Unmet

_MODULE = "horovod_compress.fronts.fsdp.ranks"
_SHARDS = 2  # of a replica, where so many divide the ranks


def begin() -> FsdpRanks:
    """Start torch.distributed for a command, with what a launcher has put into the environment."""
    begin_torch()
    size = dist.get_world_size()
    return FsdpRanks(_SHARDS if size > _SHARDS and not size % _SHARDS else 1)


class FsdpRanks(TorchRanks):
    """The ranks of the default process group, which has to be there.

    Args:
        shards: number of ranks among which each replica is divided.
    """

    name = "fsdp"

    def __init__(self, shards: int) -> None:
        shape = (self.size // shards, shards)
        self._mesh: DeviceMesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def undivided(self) -> FsdpRanks:
        return self if self._mesh["shard"].size() == 1 else FsdpRanks(1)

    def train(
        self,
        model: nn.Module,
        method: MethodName | Codec,
        wrap: Wrap = as_it_is,
        optimizer: Optimizer | None = None,
        match_norm: bool = True,
        **options: Any,
    ) -> Training:
        fully_shard(model, mesh=self._mesh["shard"])
        replicate = self._mesh["replicate"]
        compression = Compression(method, model.named_parameters(), options, Unmet(replicate), wrap)
        optimizer = optimizer or usual_optimizer(model)
        called = compression.register(model, optimizer, replicate=replicate, match_norm=match_norm)
        return Training(compression, optimizer, called)


run_local = partial(run_torch, module=_MODULE)


if __name__ == "__main__":
    selftest.serve(begin)
