"""Compression for Horovod's stock PyTorch optimizer.

    import horovod.torch as hvd
    import horovod_compress.torch as hvc

    compression = hvc.Compression.marsit(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                         compression=compression)
    compression.attach(optimizer)      # recommended: faster, same bits

or, to compress weight updates instead of gradients:

    optimizer = hvc.DistributedUpdateOptimizer(optimizer, model.named_parameters(), compression)
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
from .known import MethodName
from .observe.metrics import Stats
from .observe.trace import Trace
from .schedule.plan import Plan

if TYPE_CHECKING:
    from .codecs.option_types import method
else:
    from .codecs.by_step import method

try:
    from .fronts.horovod.compression import Compression
    from .fronts.horovod.elastic import configure as elastic, register as _register
    from .fronts.horovod.tracing import trace
    from .fronts.updates import distributed_update_optimizer as DistributedUpdateOptimizer
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "horovod":
        raise
    raise ImportError(
        "horovod_compress.torch needs Horovod, which is not installed: hvd-compress build-horovod builds it; "
        "or, with DistributedDataParallel and torchrun, import horovod_compress.ddp"
    ) from None

_register()

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
    "elastic",
    "masked",
    "method",
    "optim",
    "trace",
]
