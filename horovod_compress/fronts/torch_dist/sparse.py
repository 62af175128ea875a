"""Sparse gradients, as of embeddings with ``sparse=True``: torch reduces them, uncompressed, as without a hook."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


def mean_of(grad: Tensor, group: Any) -> Any:
    """Return a future of the mean over ranks, which travels as indices and values."""
    share = grad / dist.get_world_size(group)
    return dist.all_reduce(share, group=group, async_op=True).get_future().then(_first)


def _first(done: Any) -> Tensor:
    return done.value()[0]
