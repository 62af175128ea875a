"""signSGD with majority vote, ``signsgd``, and Signum, ``signum``, whose ranks vote with their momentum.

Bernstein et al., ICML 2018, arXiv:1802.04434, and ICLR 2019, arXiv:1810.05291.

    m = gradient, or beta * m + (1 - beta) * gradient       on each rank
    payload = [m >= 0], one bit each, and the mean of |m| of each step group
    fold: the bit is 1 where more than half of the ranks have 1; a tie is a coin's, or 1
    result = step * (2 bit - 1)

The papers' step is one fixed number, and belongs to the learning rate; here it is by default measured anew in every
round, as the mean over ranks of the mean of |m|, per tensor or per output row, so that a learning rate means what it
means without compression. ``signsgd`` keeps nothing.

Momentum of its own is one number per element and rank; it takes the place of the optimizer's. Kept is
beta m / (1 - beta): what the next gradient is added to, so that one addition gives the signs. With
beta = 0 this is signSGD, bit for bit, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from .. import ops
from ..errors import ConfigError
from ..schedule.plan import Bucket
from .base import Algebra
from .registry import register
from .shared.signs import Votes
from .work import Layout, Work, per_element


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


@register
@dataclass(frozen=True)
class Signum(Votes):
    """One bit per element: the majority of the signs of the ranks' momentum.

    Args:
        beta: momentum factor, at least 0, below 1; give the optimizer none.
        step_size: "tensor" or "row" for a step measured per tensor or per output row (short rows
            are joined until they hold 64 elements), or a fixed positive number: pure Signum with
            1.0.
        zeros: how exact zeros vote: with a "random" sign, the same on every rank, or "positive".
        ties: result of a tie, possible with an even number of ranks: a "random" sign, or "positive".
        merge: "majority", the papers' vote, or "shaped", which keeps what merging rounds off and adds it the next
            time, so that over the steps the merged signs follow the mean of the ranks' signs.
    """

    beta: float = 0.9
    step_size: Literal["tensor", "row"] | float = "row"
    zeros: Literal["random", "positive"] = "random"
    ties: Literal["random", "positive"] = "random"
    merge: Literal["majority", "shaped"] = "majority"  # see Votes

    name: ClassVar[str] = "signum"
    momentum_option: ClassVar[str] = "beta"
    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "1 bit: the sign that the momentum of most ranks has"
    source: ClassVar[str] = "Bernstein et al., ICLR 2019, arXiv:1810.05291"
    page: ClassVar[str] = "sign_methods.md#signum"
    kept: ClassVar[str] = "momentum"
    voted: ClassVar[str] = "signs of m"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"beta": 0.5, "step_size": "row"},
        {"beta": 0.75, "step_size": "tensor", "zeros": "positive"},
        {"beta": 0.5, "step_size": 0.125, "ties": "positive"},
        {"merge": "shaped", "beta": 0.5, "step_size": "row"},
    )

    def __post_init__(self) -> None:
        if type(self.beta) not in (int, float) or not 0 <= self.beta < 1:
            raise ConfigError(f"beta should be a number, at least 0, below 1, got {self.beta!r}")
        super().__post_init__()

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return replace(super().layout(bucket, world), state=per_element(bucket, "momentum") if self.beta else {})

    def _scale(self, work: Work, positions: Sequence[int]) -> float:
        return 1 - self.beta  # the means are those of m / (1 - beta)

    def _rule(self) -> ops.Feedback:
        return "momentum" if self.beta else "none"

    def _decay(self) -> float:
        return float(self.beta)
