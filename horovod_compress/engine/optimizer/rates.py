"""What waits in residuals follows the learning rate.

A residual holds gradients of earlier steps. Uncompressed training would have applied them at the learning rates of
those steps; sent later, they are applied at that of a later step. So when the rate changes from a to b, residuals are
multiplied by a / b, as in dist-EF-SGD (Zheng, Huang and Kwok, NeurIPS 2019, arXiv:1905.10936, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from ..reducer import Reducer

#: A change is followed once it has come to so much: every time costs a pass over the residuals.
SMALL = 0.05
#: No single change multiplies residuals by more than this, or divides them by more.
MOST = 10.0


class Rates:
    """Keeps residuals in step with the learning rates of an optimizer.

    Args:
        optimizer: only the rates of its groups are read.
        named: its parameters by name, as the reducer has them.
    """

    def __init__(self, optimizer: Any, reducer: Reducer, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._optimizer, self._reducer = optimizer, reducer
        self._names = {id(parameter): name for name, parameter in named}
        self._followed: list[float] = []  # the rate, by group, that residuals stand for; 0 until there is one

    def begin(self) -> None:
        """Let residuals stand for the rate of the coming step; between two steps."""
        groups = self._optimizer.param_groups
        self._followed += [0.0] * (len(groups) - len(self._followed))
        factors: dict[str, float] = {}
        for index, group in enumerate(groups):
            before, now = self._followed[index], float(group["lr"])
            if now <= 0 or (before and abs(math.log(before / now)) < SMALL):
                continue  # with a rate of 0 nothing is applied, so nothing is applied wrongly
            self._followed[index] = now
            if before:
                factor = min(max(before / now, 1 / MOST), MOST)
                factors |= {self._names[id(p)]: factor for p in group["params"] if id(p) in self._names}
        self._reducer.kept.scale_errors(factors)

    def state(self) -> list[float]:
        return list(self._followed)

    def load(self, state: Sequence[float]) -> None:
        self._followed = list(state)
