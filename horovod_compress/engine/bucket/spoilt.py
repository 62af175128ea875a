"""Kept values that would spoil every later step: not finite, or so large that no sum with them is.

What waits in a residual is added to each gradient. One NaN there makes its bucket NaN on every rank, in every step,
and no step would take it away: a bucket that is not finite leaves what is kept as it was.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: What decoding leaves is smaller, see csrc/rules/kept.h.
MOST = 2.0**96


def count(kept: Tensor) -> int:
    """Return how many values are not finite, or not below :data:`MOST`."""
    return int(_spoilt(kept).sum())


def drop(kept: Tensor) -> int:
    """Let such values be 0; return how many there were."""
    spoilt = _spoilt(kept)
    number = int(spoilt.sum())
    if number:
        kept.masked_fill_(spoilt, 0.0)
    return number


def _spoilt(kept: Tensor) -> Tensor:
    if not kept.is_floating_point():
        return torch.zeros_like(kept, dtype=torch.bool)
    return ~(kept.abs() < min(MOST, torch.finfo(kept.dtype).max))
