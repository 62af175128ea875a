"""EF-signSGD: signs with the mean magnitude, and error feedback (Karimireddy et al., ICML 2019, arXiv:1901.09847).

    p = gradient + residual                         on each rank
    payload = [p >= 0], one bit each, and s = c times the mean of |p| of each step group
    result = mean over ranks of s * (2 bit - 1)     payloads of all ranks, gathered
    residual = p - s * (2 bit - 1)                  own s, own bits

For a group of d elements |residual|^2 = |p|_2^2 - c (2 - c) |p|_1^2 / d, so signs need no coins for zeros and
lose nothing for good. The paper's c = 1 makes it smallest; with 1.8 a residual follows its gradient sooner,
and training is better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .. import ops
from ..ops.keys import Key
from .registry import register
from .shared.gathered_signs import GatheredSigns
from .work import Counts, Work

#: The default c, chosen by training: docs/sign_methods.md has the figures.
STEP = 1.8


@register
@dataclass(frozen=True)
class EfSignSgd(GatheredSigns):
    """One bit per element and a mean magnitude, with error feedback.

    Args:
        step_size: "row" for one magnitude per output row (short rows are joined until they hold 64 elements), or
            "tensor" for one per tensor, as in the paper.
        step_scale: c, the magnitude in units of the mean of |p|, above 0 and below 2; 1 in the paper.
    """

    step_size: Literal["tensor", "row"] = "row"
    step_scale: float = STEP

    name: ClassVar[str] = "ef_signsgd"
    summary: ClassVar[str] = "1 bit: signs times the mean magnitude, with error feedback"
    source: ClassVar[str] = "Karimireddy et al., ICML 2019, arXiv:1901.09847"
    page: ClassVar[str] = "sign_methods.md#ef_signsgd"
    values: ClassVar[int] = 1
    taken: ClassVar[str] = "|x|_1^2 / d"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"step_size": "row", "step_scale": 1.0},
        {"step_size": "tensor", "step_scale": 1.0},
        {"step_size": "row", "step_scale": 1.5},
        {"step_size": "row", "step_scale": STEP},
    )

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        values, groups = work.memo["values"][0], work.memo["groups"]
        steps = [values[groups[position]] for position in positions]
        lengths = [work.memo["lengths"][position] for position in positions]
        return ops.sign_offer_all(*self._submitted(work, positions), steps, lengths)
