"""The communication hook, as a function: torch looks at its annotations, which therefore are no texts here."""

from typing import Any

import torch
import torch.distributed as dist


def ddp_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Compress and exchange a bucket of DistributedDataParallel's, for frameworks that take a hook and its state.

    ``compression.register(ddp_model)`` is the same with checks of the model; ``compression.attach(optimizer)`` is
    needed beside the hook alone where an optimizer has momentum or a second moment.

    Args:
        state: a compression.
        bucket: as DistributedDataParallel hands it over.

    Returns:
        A future of the bucket's memory with the mean over ranks.
    """
    return state.exchange(bucket)
