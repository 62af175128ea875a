"""signSGD with majority vote: each element takes the sign that most ranks have.

Bernstein et al., ICML 2018, arXiv:1802.04434, and ICLR 2019, arXiv:1810.05291.

    payload = [gradient >= 0], one bit each, and the mean of |gradient| of each step group
    fold: the bit is 1 where more than half of the ranks have 1; a tie is a coin's, or 1
    result = step * (2 bit - 1)

Nothing is kept. The paper's step is one fixed number, and belongs to the learning rate; here it is by
default measured anew in every round, as the mean over ranks of the mean of |gradient|, per tensor or
per output row, so that a learning rate means what it means without compression.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from .base import Algebra
from .registry import register
from .shared.signs import Votes


@register
@dataclass(frozen=True)
class SignSgd(Votes):
    """One bit per element each way: the sign that most ranks have, times a step for each row.

    Args:
        step_size: "tensor" or "row" for a step measured per tensor or per output row (short rows
            are joined until they hold 64 elements), or a fixed positive number: pure signSGD with
            1.0.
        zeros: how exact zeros vote: with a "random" sign, the same on every rank, or "positive".
        ties: result of a tie, possible with an even number of ranks: a "random" sign, or "positive".
        merge: "majority", the papers' vote, or "shaped", which keeps what merging rounds off and adds it the next
            time, so that over the steps the merged signs follow the mean of the ranks' signs.
    """

    step_size: Literal["tensor", "row"] | float = "row"
    zeros: Literal["random", "positive"] = "random"
    ties: Literal["random", "positive"] = "random"
    merge: Literal["majority", "shaped"] = "majority"  # see Votes

    name: ClassVar[str] = "signsgd"
    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "1 bit: the sign that most ranks have"
    source: ClassVar[str] = "Bernstein et al., ICLR 2019, arXiv:1810.05291"
    page: ClassVar[str] = "sign_methods.md#signsgd"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"step_size": "row"},
        {"step_size": "tensor", "zeros": "positive"},
        {"step_size": 0.125, "ties": "positive"},
        {"merge": "shaped", "step_size": "row"},
    )
