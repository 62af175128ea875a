"""Adam's second moment again, in slow and readable NumPy."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from .numbers import load, quiet, store


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
