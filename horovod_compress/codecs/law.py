"""What a method promises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Law:
    """What a method promises, for ``x = gradient + residual`` of every rank and their mean.

    The tests that are common to all methods prove it, and tables show it.

    Attributes:
        unbiased: the result's expectation over the random bits is the mean of ``x``.
        conserves: result + mean residual afterwards = mean of ``x``, but for rounding: what is not
            sent now is not lost.
        epsilon: relative size of the rounding of one number on the wire.
        bound: the error of the result against the mean of ``x``, as a formula.
        error: returns a bound of the expected squared error of the mean, or None where there is none. It takes one
            tensor of a bucket of its own, on each rank; float64.
        zeros: where x is exactly 0 on every rank, so is the result.
        few_exact: training learns well with few exact rounds where a second moment is held; this is measured.
    """

    unbiased: bool = False
    conserves: bool = False
    epsilon: float = 2.0**-23
    bound: str = "none"
    error: Callable[[Sequence[Tensor]], float | None] | None = None
    zeros: bool = False
    few_exact: bool = False
