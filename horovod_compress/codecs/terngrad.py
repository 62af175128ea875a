"""TernGrad: every element becomes -1, 0 or +1 on a scale that all ranks share.

Wen et al., NeurIPS 2017, arXiv:1705.07878.

    c = gradient, cut off at 2.5 sigma of its tensor, sigma = the root of the mean square
    s = the largest |c| of the tensor over all ranks
    code = sign(c) with probability |c| / s, else 0
    codes are added as integers; result = s / M * code

s takes a small exchange of its own before the payload's. The rounding is unbiased, so there is no
residual; what clipping cuts off is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import Key
from ..schedule.plan import Bucket
from .base import Algebra, Law, Properties, check_choice
from .registry import register
from .shared.dithering import Rows, Uniform
from .shared.rounding import excess
from .work import Counts, Layout, Part, Work, work_dtype

#: A sum of squares below this may lack some that vanished: then nothing is cut off.
_SMALL = 2.0**-900


@register
@dataclass(frozen=True)
class TernGrad(Uniform):
    """-1, 0 or 1 on one scale per tensor, added as integers of eight bits.

    Args:
        clip: largest magnitude, in sigma of a tensor's gradient, at least 1; larger values are clipped. 0 for no limit.
        bits: bits per element: 4 for up to 7 ranks, 8 for up to 127, 16 for up to 32,767, because
            sums over all ranks must fit.
        rounding: "independent" for random bits of each rank's own; "correlated" spreads them over the ranks, so that
            errors cancel.
    """

    clip: float = 2.5
    bits: Literal[4, 8, 16] = 8
    rounding: Literal["independent", "correlated"] = "independent"

    name: ClassVar[str] = "terngrad"
    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "-1, 0 or +1 on one scale per tensor for all ranks, added"
    source: ClassVar[str] = "Wen et al., NeurIPS 2017, arXiv:1705.07878"
    page: ClassVar[str] = "quantising_methods.md#terngrad"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"bits": 4},
        {"clip": 0, "bits": 8},
        {"clip": 0, "bits": 4},
        {"clip": 1.5, "bits": 16},
        {"clip": 0, "bits": 4, "rounding": "correlated"},
    )

    def __post_init__(self) -> None:
        number = isinstance(self.clip, (int, float)) and not isinstance(self.clip, bool)
        if not number or not (self.clip == 0 or 1 <= self.clip <= sys.float_info.max):
            raise ConfigError(f"clip should be 0 for no limit, or a number of sigma, at least 1, got {self.clip!r}")
        check_choice("bits", self.bits, 4, 8, 16)
        check_choice("rounding", self.rounding, "independent", "correlated")

    def properties(self) -> Properties:
        kept = "s / M^2 times the sum over ranks of |c|_1"
        bound = kept if not self.clip else f"{kept}, and |mean of c - x|^2"
        return replace(
            super().properties(),
            law=Law(unbiased=not self.clip, bound=bound, error=self._error, zeros=True),
            divides="before",
            stands_for_mean=True,  # clipping makes it biased, but no more than that
        )

    def _error(self, x: Sequence[Tensor]) -> float:
        world, kept = len(x), [self._clipped(one) for one in x]
        scale = max(float(c.abs().max()) for c in kept) if x[0].numel() else 0.0
        magnitudes = sum(float(c.abs().sum()) for c in kept)
        variance = scale * magnitudes / world**2
        if self.rounding == "correlated":
            variance += excess(x[0].numel(), scale, magnitudes, world)
        lost = (torch.stack(kept) - torch.stack(list(x))).mean(0)
        return variance + float((lost**2).sum())

    def _clipped(self, x: Tensor) -> Tensor:
        if not self.clip or not x.numel():
            return x
        bound = self.clip * float(x.square().mean().sqrt())
        return x.clamp(-bound, bound)

    def _check_world(self, world: int) -> None:
        if world < 1 << (self.bits - 1):
            return
        enough = next((bits for bits in (8, 16) if world < 1 << (bits - 1)), None)
        advice = f"choose bits={enough}" if enough else "no width is enough"
        raise ConfigError(
            f"terngrad with bits={self.bits} supports at most {(1 << (self.bits - 1)) - 1} ranks, because sums must "
            f"fit in {self.bits} bits, got {world}; {advice}"
        )

    # ---- scales: one for each tensor ----

    @property
    def rows(self) -> Rows:
        return Rows(one_scale=False)

    def layout(self, bucket: Bucket, world: int) -> Layout:
        self._check_world(world)
        usual, number = super().layout(bucket, world), len(bucket.tensors)
        moments = {"squares": (torch.float64, number), "sizes": (torch.float64, number)}
        local = usual.local | moments | {"bounds": (work_dtype(bucket), number)}
        # Zeros stay zeros, but sigma is that of all that is not left out.
        whole = [max(1, tensor.count) for tensor in bucket.tensors] if self.clip else ()
        return replace(usual, local=local, zero_groups=whole)

    def prepare(self, work: Work) -> None:
        super().prepare(work)
        for position, tensor in enumerate(work.bucket.tensors):
            work.local["sizes"][position] = max(1, tensor.count)

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        if not self.clip:
            return super().submit(work, positions, key)
        largest, squares = (self._rows_of(name, work, positions) for name in ("parts", "squares"))
        rows = [work.memo["lengths"][position] for position in positions]
        return ops.moments_offer_all([work.grad(position) for position in positions], largest, squares, rows)

    def before(self, number: int, work: Work, key: Key) -> None:
        if self.clip and number == 0:
            self._limit(work)
        super().before(number, work, key)

    def _limit(self, work: Work) -> None:
        """Find where the own gradients are cut off; what is cut off does not widen the scale."""
        squares, sizes, bounds = (work.local[name] for name in ("squares", "sizes", "bounds"))
        if work.withheld:
            sizes = sizes.clone()
            for position, index in work.withheld.items():
                sizes[position] = max(1, work.bucket.tensors[position].count - index.numel())
        sums = squares.cpu().numpy()
        sigma = np.sqrt(sums / sizes.cpu().numpy())
        bounds.copy_(torch.from_numpy(np.where(sums < _SMALL, np.inf, self.clip * sigma)))
        torch.minimum(work.local["parts"], bounds, out=work.local["parts"])

    # ---- codes ----

    def levels(self, world: int) -> int:
        return 1

    def _bounds(self, work: Work, parts: Sequence[Part]) -> list[Tensor] | None:
        return self._rows_of("bounds", work, [part.position for part in parts]) if self.clip else None
