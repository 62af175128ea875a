"""Compression for jobs of torch.distributed, which torchrun starts; Horovod is not needed.

    import horovod_compress.ddp as hvc

    compression = hvc.Compression.marsit(model.named_parameters())
    compression.register(model, optimizer)

A model in DistributedDataParallel is registered with that: ``compression.register(ddp_model, optimizer)``.

Options, results and saved states are those of :mod:`horovod_compress.torch`; docs/ddp.md has the differences.
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
from .fronts.torch_dist.compression import Compression, ddp_hook, trace
from .fronts.torch_dist.replicas import Replicas
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
    "Replicas",
    "StateError",
    "Stats",
    "Trace",
    "available",
    "by_step",
    "ddp_hook",
    "masked",
    "method",
    "optim",
    "trace",
]
