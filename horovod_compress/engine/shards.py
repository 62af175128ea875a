"""Tensors of which each rank has a part, as ``fully_shard`` makes of parameters, gradients and optimizer state.

The engine exchanges what is here: a rank's own rows, with the ranks that have the same ones.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is divided among ranks, a DTensor; of any other one, itself."""
    if type(tensor) in (Tensor, nn.Parameter) or not is_divided(tensor):
        return tensor
    with torch.no_grad():  # else it would be a view, with a place in a graph
        found: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return found


def is_divided(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor; torch brings that module only to programs that use it."""
    for module in ("torch.distributed.tensor", "torch.distributed._tensor"):  # the second one before torch 2.5
        if (kind := getattr(sys.modules.get(module), "DTensor", None)) is not None:
            return isinstance(tensor, kind)
    return False
