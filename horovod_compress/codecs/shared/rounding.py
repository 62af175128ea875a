"""How the ranks' roundings depend on each other, and on those of earlier steps.

Correlated: with C uniform in [0, 1), drawn for each element and equal on all ranks, and a random order of the M ranks
for each step and bucket, a rank at place p rounds x, in levels, to floor(x + u) with u = C + p / M modulo 1. Each u is
uniform, so each rank's number stays unbiased; together they are spread evenly, so that errors cancel in the mean
(Suresh et al., ICML 2022, arXiv:2203.04925; DynamiQ, arXiv:2602.08923). With f the fraction of x, in levels:

    the same x on all ranks    variance of the mean = frac(M f) (1 - frac(M f)) / M^2, on average over f 1 / (6 M^2)
                               where independent roundings have f (1 - f) / M, on average 1 / (6 M)
    any x                      at most that of independent roundings + 1 / (4 M^2)

For the second one, part u = (place + v) / M with v the same on all ranks. Given v, a rank rounds up if its place is
beyond a bound; places are a random order, so these events are negatively correlated, and the variance of their sum is
at most that of independent ones. What v itself adds is the variance of a conditional mean that moves by at most 1 level
of one rank, so 1/4 at most (Popoviciu).

Averaged: what is rounded off to the nearest level is added to the next gradient as a fading average, so that it cannot
wind up, and kept in a few bits (LoCo, Xie et al., TPAMI 2025, arXiv:2407.04480). With s the distance of two levels:

    p = gradient + e;  sent = p to the nearest level;  e' = beta e + (1 - beta) (p - sent);  e' = 0 in some steps
    |e| <= half of the largest s so far, whatever the gradients are
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ... import ops
from ...errors import ConfigError
from ...ops.keys import DITHER, ORDER, Key
from ..base import check_choice, whole

#: Codes of fewer bits are so coarse that their noise counts in Adam's second moment.
COARSE = 8

# ---- correlated over ranks ----------------------------------------------------------------------


def key_of(key: Key, world: int, correlated: bool) -> Key:
    """Return the key of the numbers by which a rank rounds its gradient."""
    if not correlated:
        return key.at(purpose=DITHER)
    place = _order(key.at(rank=0, hop=0, purpose=ORDER), world)[key.rank]
    return key.at(rank=0, purpose=DITHER, shift=(place << 16) // world)


@lru_cache(maxsize=64)
def _order(key: Key, world: int) -> list[int]:
    """Return a random place for each rank: that of its number among those of all."""
    numbers = torch.empty(world, dtype=torch.int64, device="cpu")
    ops.bernoulli_words(numbers, 1, 2, key)
    places: list[int] = numbers.argsort(stable=True).argsort().tolist()
    return places


def excess(count: int, step: float, magnitudes: float, world: int) -> float:
    """Return a bound of what correlation may add to the expected squared error of the mean.

    Args:
        count: how many elements.
        step: the distance of two levels, the mean over the ranks.
        magnitudes: the sum of ``|x|`` over elements and ranks: the smaller, the less often anything is rounded up.
    """
    return min(count * step**2 / 4, step * magnitudes) / world**2 if world > 1 else 0.0


# ---- averaged over steps ------------------------------------------------------------------------


@dataclass(frozen=True)
class Average:
    """What is kept of what was rounded off.

    Attributes:
        beta: what share of the average stays.
        reset_every: after how many steps all errors are forgotten; 0 for never.
        bits: of an error.
    """

    beta: float
    reset_every: int
    bits: int

    def forgets(self, key: Key) -> bool:
        """Return whether a step begins without errors: the same one for all tensors."""
        return bool(self.reset_every) and key.step % self.reset_every == 0

    def rule(self) -> dict[str, Any]:
        """Return what kernels ask for."""
        return {"kept_bits": self.bits, "beta": self.beta}


#: Plain error feedback.
PLAIN = Average(0.0, 0, 8)
#: LoCo's own.
USUAL = {"beta": 0.8, "reset_every": 1024, "residual_bits": 8}


def check_feedback(codec: Any, name: str) -> None:
    """Refuse options of feedback that fit together badly, and let those that were not given be LoCo's.

    Raises:
        ConfigError: says what would fit.
    """
    check_choice("feedback", codec.feedback, "none", "average")
    given = [option for option in USUAL if getattr(codec, option) is not None]
    if codec.feedback == "none":
        if codec.rounding == "nearest":
            raise ConfigError(
                f'{name} with rounding="nearest" would lose the same part of a gradient in every step; add '
                'feedback="average", or choose rounding="independent" or "correlated"'
            )
        if given:
            raise ConfigError(
                f'{given[0]} is for feedback="average", got {getattr(codec, given[0])!r} with feedback="none"; add '
                f'feedback="average" and rounding="nearest", or leave {given[0]} out'
            )
        return
    if codec.rounding != "nearest":
        raise ConfigError(
            f'feedback="average" needs rounding="nearest", got {codec.rounding!r}: numbers that are rounded at random '
            'are right on average without a memory; add rounding="nearest", or leave feedback out'
        )
    for option in set(USUAL) - set(given):  # ranks and checkpoints compare what is in force
        object.__setattr__(codec, option, USUAL[option])
    beta, every, bits = codec.beta, codec.reset_every, codec.residual_bits
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 <= beta < 1:
        raise ConfigError(f"beta should be a number from 0, for plain error feedback, to less than 1, got {beta!r}")
    object.__setattr__(codec, "beta", float(beta))
    if not whole(every) or not 0 <= every < 1 << 31:
        raise ConfigError(f"reset_every should be a whole number of steps, or 0 for never, got {every!r}")
    if not whole(bits) or not 2 <= bits <= 8:
        raise ConfigError(f"residual_bits should be a whole number from 2 to 8, got {bits!r}")


def average_of(codec: Any) -> Average | None:
    """Return the feedback of a method, None for none."""
    if codec.feedback == "none":
        return None
    return Average(codec.beta, codec.reset_every, codec.residual_bits)
