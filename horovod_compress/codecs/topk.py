"""Top-k: the elements of largest magnitude with their values.

Aji and Heafield, arXiv:1704.05021, EMNLP 2017; with the residual of Stich et al., *Sparsified SGD with Memory*,
arXiv:1809.07599, NeurIPS 2018.

    x = gradient + residual, for each tensor of d elements; k = ceil(density * d)
    T = the k largest |x|, exactly; the lower position among equals, never a zero
    payload  = the positions of T, as gaps in Golomb code, and x there; with value_bits=16 rounded
    result   = mean over ranks of (the rank's values at its positions)
    residual = x - (the own values at the own positions)

With 16 bits the residual keeps what rounding took.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..ops.keys import Key
from ..schedule.plan import Bucket
from .base import Law, Properties, check_choice
from .registry import register
from .shared.sections import Sections, share, value_form
from .work import Counts, Work, together


@register
@dataclass(frozen=True)
class TopK(Sections):
    """The largest 1 % of each tensor's elements with their exact values; the others wait in the residual.

    Args:
        density: share of each tensor's elements that is sent, above 0, at most 1.
        value_bits: bits per value: 32 (64 for float64 gradients), or 16: float16 for float16 gradients, else
            bfloat16.
    """

    value_bits: Literal[16, 32] = 32

    name: ClassVar[str] = "topk"
    summary: ClassVar[str] = "the largest values, exactly, and their positions in Golomb code"
    source: ClassVar[str] = "Aji and Heafield, EMNLP 2017, arXiv:1704.05021"
    page: ClassVar[str] = "sparse_methods.md#top-k"
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({"density": 0.01}, {"density": 0.3, "value_bits": 16})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("value_bits", self.value_bits, 16, 32)

    def properties(self) -> Properties:
        law = Law(conserves=True, bound="own: (1 - k/d) |x|^2", error=self._error, zeros=True)
        return replace(super().properties(), law=law)

    def form(self, bucket: Bucket) -> str:
        return value_form(self.value_bits, bucket)

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        nonfinite = super().submit(work, positions, key)
        if work.memo["form"] != "bfloat16" or work.bucket.dtype != "float64":
            return nonfinite
        self.settle(work, positions)
        # Of a larger one every step could send only so little that it would wait forever.
        most, values = torch.finfo(torch.bfloat16).max, [self.values(work, position) for position in positions]
        large = together([torch.count_nonzero(one.abs() > most) for one in values])
        return [count or found for count, found in zip(nonfinite, large, strict=True)]

    def _error(self, x: Sequence[Tensor]) -> float:
        rounding = 0.0 if self.value_bits == 32 else 2.0**-16
        left = 1 - share(self.density, x[0].numel()) / x[0].numel() + rounding
        return left * sum(float(mine.square().sum()) for mine in x) / len(x)
