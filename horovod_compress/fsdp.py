"""Compression between the replicas of models that ``fully_shard`` divides; Horovod is not needed.

    import horovod_compress.fsdp as hvc

    mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    compression = hvc.Compression.marsit(model.named_parameters())
    compression.register(model, optimizer, replicate=mesh["replicate"])

Methods and options are those of :mod:`horovod_compress.ddp`; docs/fsdp.md has the differences.
"""

from typing import TYPE_CHECKING

from .codecs.by_step import by_step
from .codecs.masked import masked
from .codecs.registry import available
from .errors import (
    ConfigError,
    CorruptFrameError,
    ExchangeError,
    HorovodCompressError,
    MismatchError,
    NonFiniteError,
    StateError,
)
from .fronts import optim
from .fronts.fsdp.compression import Compression
from .fronts.torch_dist.compression import trace
from .fronts.updates import distributed_update_optimizer as DistributedUpdateOptimizer
from .known import MethodName
from .observe.metrics import Stats
from .observe.trace import Trace
from .schedule.plan import Plan

if TYPE_CHECKING:
    from .codecs.option_types import method
else:
    from .codecs.by_step import method

__all__ = [
    "Compression",
    "ConfigError",
    "CorruptFrameError",
    "DistributedUpdateOptimizer",
    "ExchangeError",
    "HorovodCompressError",
    "MethodName",
    "MismatchError",
    "NonFiniteError",
    "Plan",
    "StateError",
    "Stats",
    "Trace",
    "available",
    "by_step",
    "masked",
    "method",
    "optim",
    "trace",
]
