"""1-bit SGD: signs with a value for each side, and error feedback (Seide et al., Interspeech 2014).

    p = gradient + residual                         on each rank
    payload = [p >= 0], one bit each, and for each step group
              high = c times the mean of p where it is >= 0, low = c times that below 0; 0 where there is none
    result = mean over ranks of (high where the bit is 1, low where it is 0)      payloads gathered
    residual = p - (own high or low)

For sides cut at zero the means, c = 1, are the two best values: no others leave a smaller sum of squares. With
c = 1.5 a residual follows its gradient sooner, and training is better. The paper has means for each column of a
weight matrix, which is an output row here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from .. import ops
from ..ops.keys import Key
from .registry import register
from .shared.gathered_signs import GatheredSigns
from .shared.signs import LARGE_STEP, fill_group_sizes, left_out
from .work import Counts, Regions, Work


@register
@dataclass(frozen=True)
class OneBit(GatheredSigns):
    """One bit per element and the means of both sides, with error feedback.

    Args:
        step_size: "row" for two values per output row (short rows are joined until they hold 64
            elements), or "tensor" for two per tensor.
        step_scale: c, both values in units of their means, above 0 and below 2; 1 in the paper.
    """

    step_size: Literal["tensor", "row"] = "row"
    step_scale: float = LARGE_STEP

    name: ClassVar[str] = "onebit"
    summary: ClassVar[str] = "1 bit: the means of both sides of zero, with error feedback"
    source: ClassVar[str] = "Seide et al., Interspeech 2014"
    page: ClassVar[str] = "sign_methods.md#onebit"
    values: ClassVar[int] = 2
    taken: ClassVar[str] = "(d1 high^2 + d0 low^2)"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"step_size": "tensor", "step_scale": 1.0},
        {"step_size": "row", "step_scale": 1.0},
        {"step_size": "row", "step_scale": 1.5},
    )

    def _local(self, groups: int) -> Regions:
        return dict.fromkeys(("highs", "lows", "sizes"), (torch.float64, groups)) | {"ones": (torch.int64, groups)}

    def prepare(self, work: Work) -> None:
        super().prepare(work)
        fill_group_sizes(work.local["sizes"], work.bucket, self._by_row())

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        groups = [work.memo["groups"][position] for position in positions]
        highs, lows, ones = ([work.local[name][own] for own in groups] for name in ("highs", "lows", "ones"))
        lengths = [work.memo["lengths"][position] for position in positions]
        return ops.two_value_offer_all(*self._submitted(work, positions), highs, lows, ones, lengths)

    def before(self, number: int, work: Work, key: Key) -> None:
        highs, lows, ones = (work.local[name] for name in ("highs", "lows", "ones"))
        zeros = work.local["sizes"] - ones
        for position in work.withheld:  # there p is 0, which has the bit 1
            mine = ones[work.memo["groups"][position]]
            mine.sub_(left_out(work, position, work.memo["lengths"][position], mine.numel()))
        # An empty side has the sum 0, so any divisor gives 0.
        means = (highs.div_(ones.clamp(min=1)), lows.div_(zeros.clamp_(min=1)).neg_())
        for values, mean in zip(work.memo["values"], means, strict=True):
            values.copy_(mean)
        super().before(number, work, key)
