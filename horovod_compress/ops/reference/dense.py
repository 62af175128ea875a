"""Plain numbers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .numbers import load, offered, quiet, store


def dense_offer(grad: Tensor, residual: Tensor | None, out: Tensor) -> int:
    store(out, offered(grad, residual))
    return int(np.count_nonzero(~np.isfinite(load(out))))


@quiet
def dense_add(into: Tensor, other: Tensor) -> None:
    store(into, load(into) + load(other))


@quiet
def dense_decode(payload: Tensor, grad: Tensor, *, scale: float, residual: Tensor | None = None) -> None:
    work = np.float64 if torch.float64 in (payload.dtype, grad.dtype) else np.float32
    store(grad, load(payload).astype(work) * work(scale))
    if residual is not None:
        residual.numpy()[:] = 0


def triad(a: Tensor, b: Tensor, c: Tensor, s: float) -> None:
    a.numpy()[:] = b.numpy() + np.float32(s) * c.numpy()
