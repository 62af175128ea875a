"""Torch's ZeroRedundancyOptimizer, each of whose ranks steps its own share of the parameters: refused by name."""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch

from ...errors import ConfigError

_MODULE = "torch.distributed.optim.zero_redundancy_optimizer"


def refuse_sharded(optimizer: Any, own: bool) -> None:
    """Refuse an optimizer whose second moment is divided among the ranks.

    Args:
        own: nobody is to hold a second moment; then the whole of it can be served, not the share of one rank.

    Raises:
        ConfigError: says what to do.
    """
    kind: Any = getattr(sys.modules.get(_MODULE), "ZeroRedundancyOptimizer", None)
    if kind is None:
        return
    if isinstance(optimizer, kind):
        if not own and not isinstance(getattr(optimizer, "optim", None), torch.optim.SGD):  # which has none
            raise ConfigError(
                "ZeroRedundancyOptimizer divides its state among the ranks, and a second moment that is held has to "
                "be whole on every rank: give DistributedDataParallel's model the plain optimizer, or write "
                'second_moment="own", with which training is slower, or choose a method that needs none held, such as '
                "global_qsgd or fp16"
            )
    elif any(found.optim is optimizer for found in gc.get_objects() if issubclass(type(found), kind)):
        raise ConfigError(
            "this optimizer is the .optim of a ZeroRedundancyOptimizer, which has only this rank's share of the "
            "parameters: use the plain optimizer without ZeroRedundancyOptimizer, or give that itself with "
            'second_moment="own"'
        )
