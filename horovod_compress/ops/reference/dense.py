"""Plain numbers, and what an optimizer keeps."""

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


@quiet
def adam_hold(
    second: Tensor,
    first: Tensor,
    grad: Tensor,
    square: Tensor,
    floors: Tensor | None,
    row_length: int,
    *,
    betas: tuple[float, float],
    step: float,
    bound: float,
    left: float,
) -> None:
    beta1, beta2 = betas
    m, g, d = load(first), load(grad), square.numpy().reshape(-1)
    number = d.dtype.type
    if floors is not None:
        floor = floors.numpy().repeat(row_length)[: d.size]
        d = np.where(floor > d, floor, d)
    d = d.reshape(m.shape)
    most = number(1 / ((1 - beta1**step) * bound)) * (m + number(1 - beta1) * (g - m))
    d = np.where(most * most > d, most * most, d)
    coming = number((1 - beta2) / beta2) * (g * g)
    given = number((1 - beta2**step) / beta2) * d - coming
    below = number(1e-30) - number(1 - left) * coming
    lowest = np.where(below < 0, below, number(0))
    store(second, np.where(given > lowest, given, lowest))
