"""Top-k: the elements of largest magnitude with their values.

Aji and Heafield, arXiv:1704.05021, EMNLP 2017; with the residual of Stich et al., *Sparsified SGD with Memory*,
arXiv:1809.07599, NeurIPS 2018.

    x = gradient + residual, for each tensor of d elements; k = ceil(density * d)
    T = the k largest |x|, exactly; the lower position among equals, never a zero
    payload  = the positions of T, as gaps in Golomb code, and x there; with value_bits=16 rounded
    result   = mean over ranks of (the rank's values at its positions)
    residual = x - (the own values at the own positions)

With 16 bits the residual keeps what rounding took. With ``positions="leader"`` all ranks send their values at the
positions of one of them: see :mod:`.shared.led`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..ops.keys import Key
from ..schedule.plan import Bucket
from .base import Codec, Law, Properties, check_choice
from .registry import register
from .shared.led import Led
from .shared.sections import Sections, share, value_form
from .work import Counts, Layout, Work, together


@register
@dataclass(frozen=True)
class TopK(Sections):
    """The largest 1 % of each tensor's elements with their exact values; the others wait in the residual.

    Args:
        density: share of each tensor's elements that is sent, above 0, at most 1.
        value_bits: bits per value: 32 (64 for float64 gradients), or 16: float16 for float16 gradients, else
            bfloat16.
        positions: "own" for those of each rank's largest, which are gathered; "leader" for those of one rank's, another
            one in every step, where values of all ranks add: its bytes do not grow with the number of ranks.
        filter: with "leader", how much of what is new goes into the residual, above 0, at most 1. Less than 1 keeps
            large residuals from piling up at high learning rates, and loses some of what was not sent.
    """

    value_bits: Literal[16, 32] = 32
    positions: Literal["own", "leader"] = "own"
    filter: float = 1.0

    name: ClassVar[str] = "topk"
    summary: ClassVar[str] = "the largest values, exactly, and their positions in Golomb code"
    source: ClassVar[str] = "Aji and Heafield, EMNLP 2017, arXiv:1704.05021"
    page: ClassVar[str] = "sparse_methods.md#top-k"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"density": 0.01},
        {"density": 0.3, "value_bits": 16},
        {"density": 0.05, "positions": "leader"},
        {"density": 0.3, "positions": "leader", "filter": 0.5},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("value_bits", self.value_bits, 16, 32)
        check_choice("positions", self.positions, "own", "leader")
        if type(self.filter) not in (int, float) or not 0 < self.filter <= 1:
            raise ConfigError(f"filter should be a number above 0, at most 1, got {self.filter!r}")
        if self.positions == "leader" and self.value_bits != 32:
            raise ConfigError('value_bits should be 32 with positions="leader", whose values add, got 16')
        if self.positions == "own" and self.filter != 1:
            raise ConfigError(f'filter is for positions="leader", got {self.filter!r} with "own"')

    @cached_property
    def _led(self) -> Led | None:
        return Led(self.density, float(self.filter)) if self.positions == "leader" else None

    def for_step(self, step: int, *, compressed: bool = False) -> Codec:
        return self._led or self

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return self._led.layout(bucket, world) if self._led else super().layout(bucket, world)

    def properties(self) -> Properties:
        if self._led:
            return replace(self._led.properties(), variants=(self._led,))
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
        counts = nonfinite.tolist() if isinstance(nonfinite, Tensor) else nonfinite
        return [count or found for count, found in zip(counts, large, strict=True)]

    def _error(self, x: Sequence[Tensor]) -> float:
        rounding = 0.0 if self.value_bits == 32 else 2.0**-16
        left = 1 - share(self.density, x[0].numel()) / x[0].numel() + rounding
        return left * sum(float(mine.square().sum()) for mine in x) / len(x)
