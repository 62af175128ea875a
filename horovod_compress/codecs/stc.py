"""Sparse ternary compression: positions of the largest values, their signs, one magnitude for all.

Sattler, Wiedemann, Müller and Samek, arXiv:1903.02891, IEEE TNNLS 2019.

    x = gradient + residual, for each tensor of d elements; k = ceil(density * d)
    T = the k largest |x|, exactly; the lower position among equals, never a zero
    mean     = the mean of |x| over T
    payload  = the mean, the positions of T as gaps in Golomb code, and a sign for each
    result   = mean over ranks of (sign * mean at the rank's positions)
    residual = x - (own sign * own mean at the own positions)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..schedule.plan import Bucket, TensorSpec
from .base import Law, Properties
from .registry import register
from .shared.sections import NUMBERS, Sections, share
from .work import Regions, Work, work_dtype


@register
@dataclass(frozen=True)
class Stc(Sections):
    """The largest 1 % of each tensor's elements, with one magnitude for all; the others wait in the residual.

    Args:
        density: share of each tensor's elements that is sent, above 0, at most 1.
    """

    name: ClassVar[str] = "stc"
    summary: ClassVar[str] = "positions of the largest values in Golomb code, their signs, and one magnitude"
    source: ClassVar[str] = "Sattler et al., IEEE TNNLS 2019, arXiv:1903.02891"
    page: ClassVar[str] = "sparse_methods.md#sparse-ternary-compression"
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({"density": 0.01}, {"density": 0.3})

    def properties(self) -> Properties:
        law = Law(conserves=True, bound="own: (1 - k mean^2 / |x|^2) |x|^2", error=self._error, zeros=True)
        return replace(super().properties(), law=law)

    def form(self, bucket: Bucket, tensor: TensorSpec) -> str:
        return "signs"

    def _error(self, x: Sequence[Tensor]) -> float:
        k, total = share(self.density, x[0].numel()), 0.0
        for mine in x:
            largest = float(mine.abs().topk(k).values.sum())
            total += float(mine.square().sum()) - largest * largest / k
        return total / len(x)

    def _scratch(self, bucket: Bucket) -> Regions:
        number = len(bucket.tensors)
        return super()._scratch(bucket) | {"sums": (torch.float64, number), "means": (work_dtype(bucket), number)}

    def heads(self, work: Work, positions: Sequence[int]) -> Sequence[Tensor | None]:
        """Return the mean magnitudes, from sums in one fixed order."""
        kept: list[int] = [work.memo["kept"][position] for position in positions]
        sums, means = (work.local[name].zero_() for name in ("sums", "means"))
        of = [position for position, number in zip(positions, kept, strict=True) if number]
        each = [sums[position : position + 1] for position in of]
        ops.norm_offer_all(
            [self.values(work, position) for position in of], each, [number for number in kept if number], power=1
        )
        # Of how many values each is, the selection has written there; a sum of none is 0 whatever it is divided by.
        means.copy_(sums / work.local["numbers"][::NUMBERS].clamp(min=1))
        means.clamp_(max=work.limit())  # the residual keeps the rest
        return [means[position : position + 1] for position in positions]
