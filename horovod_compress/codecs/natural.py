"""Natural compression: every element becomes a power of two, up or down at random.

Horvath et al., MSML 2022, arXiv:1905.10988.

    N = a power of two, at or above the largest |x| of the bucket over all ranks
    code = sign and exponent of x / N, rounded to one of the two neighbouring powers of two without bias
    fold: the mean of all ranks' numbers, rounded in the same way by the owner of the chunk
    result = N * code

Both directions are compressed, without residual: both roundings are unbiased. N takes a small exchange
of its own before the payload's, so that exponents need 7 bits and no number overflows.

With a mantissa of 2 bits the levels are 1, 1.25, 1.5 and 1.75 times each power of two, down to 2^-31 N: floating-point
numbers of 8 bits like E5M2 of Micikevicius et al., arXiv:2209.05433. The first exact rounds of other methods send them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..ops.keys import DITHER, Key
from .base import Algebra, Law, Piece, Properties, check_choice
from .registry import register
from .shared.dithering import PowersOfTwo
from .work import Work, dtype_of

#: The code of N itself; a mean is no larger.
_HEADROOM = 1
#: The smallest level is N times 2 to minus this, by mantissa.
_OCTAVES = {0: 96, 2: 31}


@register
@dataclass(frozen=True)
class Natural(PowersOfTwo):
    """Eight bits per element: a sign and a power of two, averaged by the owner of a chunk and rounded again.

    Args:
        mantissa: 2 for a mantissa of two bits: floating-point numbers of 8 bits, right within a quarter; 0 for none.
    """

    mantissa: Literal[0, 2] = 0

    bits: ClassVar[int] = 8  # type: ignore[misc]
    name: ClassVar[str] = "natural"
    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "8 bits: powers of two, averaged and rounded again"
    source: ClassVar[str] = "Horvath et al., MSML 2022, arXiv:1905.10988"
    page: ClassVar[str] = "quantising_methods.md#natural"
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"mantissa": 2})

    def __post_init__(self) -> None:
        check_choice("mantissa", self.mantissa, 0, 2)

    def properties(self) -> Properties:
        part = "80" if self.mantissa else "8"
        bound = f"(1 + 1/{part}) E + |mean|^2 / {part}, E = sum over ranks of |x|^2 / ({part} M^2)"
        return replace(super().properties(), law=Law(unbiased=True, bound=bound, error=self._error, zeros=True))

    def _error(self, x: Sequence[Tensor]) -> float:
        world, mean = len(x), torch.stack(list(x)).mean(0)
        largest = max(float(one.abs().max()) for one in x) if mean.numel() else 0.0
        lost = mean.numel() * (largest * 2.0 ** (1 - _OCTAVES[self.mantissa])) ** 2  # below the smallest level
        step = 2.0**-self.mantissa  # between two levels, relative to the power of two that they begin at
        part = step**2 / (4 * (1 + step))  # where neighbours are 1 and 1 + step, at their harmonic mean
        first = part * sum(float(one.square().sum()) for one in x) / world**2 + lost
        return first if world == 1 else (1 + part) * first + part * float(mean.square().sum())

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
        rule = {"headroom": _HEADROOM, "mantissa": self.mantissa}
        ops.exponential_fold(ranks, piece.values, again, **rule, offset=piece.start)

    def _decode(self, *given: Any, world: int, result_scale: float) -> None:
        super()._decode(*given, world=1, result_scale=result_scale)  # a fold is a mean


def _power_of_two(value: float, most: float) -> float:
    """Return the next power of two, or the value itself where that power would be above ``most``."""
    fraction, exponent = math.frexp(value)
    if value == 0 or fraction == 0.5 or exponent >= math.frexp(most)[1]:
        return value
    return math.ldexp(1.0, exponent)
