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

from .. import ops
from ..ops.keys import Key
from .registry import register
from .shared.gathered_signs import GatheredSigns
from .work import Counts, Work


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

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        values, groups = work.memo["values"][0], work.memo["groups"]
        steps = [values[groups[position]] for position in positions]
        lengths = [work.memo["lengths"][position] for position in positions]
        return ops.sign_offer_all.counts(*self._submitted(work, positions), steps, lengths)
