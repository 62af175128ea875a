"""EF-signSGD: signs with the mean magnitude, and error feedback (Karimireddy et al., ICML 2019, arXiv:1901.09847).

    p = gradient + residual                         on each rank
    payload = [p >= 0], one bit each, and s = the mean of |p| of each step group
    result = mean over ranks of s * (2 bit - 1)     payloads of all ranks, gathered
    residual = p - s * (2 bit - 1)                  own s, own bits

What is kept is p less its share along the signs: |residual|^2 = (1 - |p|_1^2 / (d |p|_2^2)) |p|_2^2 for a
group of d elements, so signs need no coins for zeros and lose nothing for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..ops.keys import Key
from .registry import register
from .shared.gathered_signs import GatheredSigns
from .work import Regions, Work


@register
@dataclass(frozen=True)
class EfSignSgd(GatheredSigns):
    """One bit per element and a mean magnitude, with error feedback.

    Args:
        step_size: "row" for one magnitude per output row (short rows are joined until they hold 64 elements), or
            "tensor" for one per tensor, as in the paper.
    """

    step_size: str = "row"

    name: ClassVar[str] = "ef_signsgd"
    summary: ClassVar[str] = "1 bit: signs times the mean magnitude, with error feedback"
    source: ClassVar[str] = "Karimireddy et al., ICML 2019, arXiv:1901.09847"
    page: ClassVar[str] = "sign_methods.md#ef_signsgd"
    values: ClassVar[int] = 1
    bound: ClassVar[str] = "(1 - |x|_1^2 / (d |x|^2)) |x|^2"
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({"step_size": "row"}, {"step_size": "tensor"})

    def _local(self, groups: int) -> Regions:
        return dict.fromkeys(("sums", "sizes"), (torch.float64, groups))

    def offer(self, work: Work, position: int, key: Key) -> int | Tensor:
        return ops.sign_offer(
            work.grad(position),
            work.residual_of(position),
            self._bits(work, work.regions["payload"], position),
            work.local["sums"][work.memo["groups"][position]],
            work.memo["lengths"][position],
        )

    def offer_all(self, work: Work, positions: Sequence[int], key: Key) -> Tensor:
        """Take in several gradients, and write their values at once."""
        values, groups = self._values(work, work.regions["payload"], 0), work.memo["groups"]
        steps = [values[groups[position]] for position in positions]
        lengths = [work.memo["lengths"][position] for position in positions]
        return ops.sign_offer_all(*self._offered(work, positions), steps, lengths)

    def _means(self, work: Work) -> list[Tensor]:
        return [] if work.together else [work.local["sums"].div_(work.local["sizes"])]
