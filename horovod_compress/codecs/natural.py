"""Natural compression: every element becomes a power of two, up or down at random.

Horvath et al., MSML 2022, arXiv:1905.10988.

    N = a power of two, at or above the largest |x| of the bucket over all ranks
    code = sign and exponent of x / N, rounded to one of the two neighbouring powers of two without bias
    fold: the mean of all ranks' numbers, rounded in the same way by the owner of the chunk
    result = N * code

Both directions are compressed, without residual: both roundings are unbiased. N takes a small exchange
of its own before the payload's, so that exponents need 7 bits and no number overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..ops.keys import DITHER, Key
from .base import Algebra, Law, Piece, Properties
from .registry import register
from .shared.dithering import PowersOfTwo
from .work import Work, dtype_of

#: The exponent of N itself; a mean is no larger.
_HEADROOM = 1
_EXPONENTS = 96


@register
@dataclass(frozen=True)
class Natural(PowersOfTwo):
    """Eight bits per element: a sign and a power of two, averaged by the owner of a chunk and rounded again."""

    bits: ClassVar[int] = 8  # type: ignore[misc]

    name: ClassVar[str] = "natural"
    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "8 bits: powers of two, averaged and rounded again"
    source: ClassVar[str] = "Horvath et al., MSML 2022, arXiv:1905.10988"
    page: ClassVar[str] = "quantising_methods.md#natural"

    def properties(self) -> Properties:
        bound = "9/8 E + |mean|^2 / 8, E = sum over ranks of |x|^2 / (8 M^2)"
        return replace(super().properties(), law=Law(unbiased=True, bound=bound, error=self._error, zeros=True))

    def _error(self, x: Sequence[Tensor]) -> float:
        world, mean = len(x), torch.stack(list(x)).mean(0)
        largest = max(float(one.abs().max()) for one in x) if mean.numel() else 0.0
        lost = mean.numel() * (largest * 2.0 ** (1 - _EXPONENTS)) ** 2  # below the smallest power
        first = sum(float(one.square().sum()) for one in x) / (8 * world**2) + lost
        return first if world == 1 else 9 / 8 * first + float(mean.square().sum()) / 8

    # ---- scales ----

    def _make_scales(self, work: Work) -> None:
        most = torch.finfo(dtype_of(work.bucket)).max
        work.local["scales"][0] = _power_of_two(float(work.shared["norms"][0]), most)

    # ---- codes ----

    def headroom(self, world: int) -> int:
        return _HEADROOM

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        if piece.region == "norms":
            super().fold(work, piece, others, key)
            return
        ranks = [*others[: key.rank], piece.values, *others[key.rank :]]
        again = key.at(hop=1, purpose=DITHER)
        ops.exponential_fold(ranks, piece.values, again, headroom=_HEADROOM, offset=piece.start)

    def _decode(self, *given: Any, world: int, result_scale: float) -> None:
        super()._decode(*given, world=1, result_scale=result_scale)  # a fold is a mean


def _power_of_two(value: float, most: float) -> float:
    """Return the next power of two, or the value itself where that power would be above ``most``."""
    fraction, exponent = math.frexp(value)
    if value == 0 or fraction == 0.5 or exponent >= math.frexp(most)[1]:
        return value
    return math.ldexp(1.0, exponent)
