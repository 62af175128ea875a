"""Adam's second moment again, in slow and readable NumPy; see :mod:`.basic`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .basic import _quiet, load, store


@_quiet
def adam_hold_all(
    seconds: Sequence[Tensor],
    firsts: Sequence[Tensor],
    grads: Sequence[Tensor],
    squares: Sequence[Tensor],
    floors: Sequence[Tensor] | None,
    *,
    betas: tuple[float, float],
    step: float,
    bound: float,
    left: float,
) -> None:
    beta1, beta2 = betas
    for i, (second, first, grad, square) in enumerate(zip(seconds, firsts, grads, squares, strict=True)):
        m, g, d = load(first), load(grad), square.numpy()
        number = d.dtype.type
        if floors and d.size:
            floor = floors[i].numpy().repeat(d.size // floors[i].numel())
            d = np.where(floor > d.reshape(-1), floor, d.reshape(-1)).reshape(d.shape)
        most = number(1 / ((1 - beta1**step) * bound)) * (m + number(1 - beta1) * (g - m))
        d = np.where(most * most > d, most * most, d)
        coming = number((1 - beta2) / beta2) * (g * g)
        given = number((1 - beta2**step) / beta2) * d - coming
        below = number(1e-30) - number(1 - left) * coming
        lowest = np.where(below < 0, below, number(0))
        store(second, np.where(given > lowest, given, lowest))
