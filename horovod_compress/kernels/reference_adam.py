"""Adam's second moment again, in slow and readable NumPy; see :mod:`.reference`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .reference import _quiet, load, store


@_quiet
def adam_hold_all(
    seconds: Sequence[Tensor],
    firsts: Sequence[Tensor],
    grads: Sequence[Tensor],
    roots: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    step: float,
    bound: float,
) -> None:
    beta1, beta2 = betas
    for second, first, grad, root in zip(seconds, firsts, grads, roots, strict=True):
        m, g, d = load(first), load(grad), root.numpy()
        number = d.dtype.type
        moved = m + number(1 - beta1) * (g - m)
        least = number(1 / ((1 - beta1**step) * bound)) * np.abs(moved)
        d = np.where(least > d, least, d)
        left = number((1 - beta2**step) / beta2) * (d * d) - number((1 - beta2) / beta2) * (g * g)
        store(second, np.where(left > 0, left, number(0)))
