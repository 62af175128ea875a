"""The communication hook, as a function: torch looks at its annotations, which therefore are no texts here."""

from typing import Any

import torch
import torch.distributed as dist

from ...errors import ConfigError
from .checks import PYTHON_REDUCER


def ddp_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Compress and exchange a bucket of DistributedDataParallel, for frameworks that take a hook and its state.

    ``compression.register(ddp_model, optimizer)`` does the same and also checks the model. With this hook alone, call
    ``compression.attach(optimizer)`` as well if the optimizer has momentum or a second moment.

    Args:
        state: a compression.
        bucket: the bucket that DistributedDataParallel passes to its hook.

    Returns:
        A future of the bucket's memory with the mean over ranks.
    """
    if not isinstance(bucket, dist.GradBucket):
        raise ConfigError(PYTHON_REDUCER)
    return state.exchange(bucket)
