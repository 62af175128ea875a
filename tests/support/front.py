"""The front that the launcher of a job has chosen, for jobs that run under both: its module, and its start."""

from __future__ import annotations

import os
from typing import Any

#: Whether gradients travel under DistributedDataParallel.
DDP = "HOROVOD_RANK" not in os.environ

if DDP:
    import horovod_compress.ddp as hvc
else:
    import horovod_compress.torch as hvc  # type: ignore[no-redef]

__all__ = ["DDP", "hvc", "start", "trained"]


def start() -> None:
    """Join the job."""
    if DDP:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    else:
        import horovod.torch as hvd

        hvd.init()


def trained(
    model: Any, optimizer: Any, compression: Any, attach: Any = None, ddp: Any = None, *, plain: bool = False
) -> tuple[Any, Any]:
    """Return the model to be called and the optimizer to be used.

    Args:
        attach: options of ``attach()``.
        ddp: options of DistributedDataParallel.
        plain: the model is in no DistributedDataParallel.
    """
    if plain:
        return compression.register(model, optimizer, **(attach or {})), optimizer
    if DDP:
        from torch.nn.parallel import DistributedDataParallel

        called = DistributedDataParallel(model, **(ddp or {}))
        return compression.register(called, optimizer, **(attach or {})), optimizer
    import horovod.torch as hvd

    named = list(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    return model, compression.attach(optimizer, **(attach or {}))
