"""Small models, and data that differ between ranks; of no front, so that jobs without Horovod have them too."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def net(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    """Return the same model on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(144, 40), nn.Tanh(), nn.Linear(40, 10)
    ).to(dtype)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return inputs that differ between ranks and steps."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 1, 8, 8, generator=generator).to(dtype)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of the bits of tensors, wherever they are."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


class OfOne(torch.autograd.Function):
    """What brings no gradient of the second one."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        return left * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None
