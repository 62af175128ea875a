"""Marsit: one sign bit per element on every hop (Wu et al., DAC 2022, arXiv:2204.06787).

    x = gradient + residual
    payload = [x >= 0], one bit each, and the mean of |x| of each step group
    merge: round the sum of the signs and of what the last merge here rounded off, to -1, 0 or 1 where one rank
           sees all of them and to a sign in a ring; or, as in the paper, where two partial payloads of a and b
           ranks differ, take the second's bit with probability b / (a + b): the final bit is 1 with
           probability (ranks with bit 1) / M
    result G = step * the merged sign, or 0
    residual = x - G                      global compensation, or
               decay (x - own sign's step)  ordinary error feedback, whose memory may fade

Every ``full_precision_every`` rounds, from round 0 on, x itself is averaged instead and the residual is
emptied. The paper's step is one fixed number; here it is by default measured anew in every round,
as the mean over ranks of the mean of |x|, per tensor or per output row; times 1.5 with shaped merging and an own
residual, which then does not fade, or 1.8 where two ranks round nothing off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import Key
from ..schedule.plan import Bucket
from .base import FULL_PRECISION_EVERY, Algebra, Codec, Feedback, Law, Piece, Properties, check_choice, whole
from .dense import FullPrecision, ShortFullPrecision
from .registry import register
from .shared.residual_dtype import ResidualDtype, check_residual_dtype, epsilon_of, residual_state
from .shared.signs import LARGE_STEP, LARGER_STEP, PAIR, Signs, check_step, check_step_scale, shaped_fold
from .work import Layout, Work


@register
@dataclass(frozen=True)
class Marsit(Signs):
    """Signs with error feedback: a rank sends one bit per element, and owners pass on -1, 0 or 1 in 1.6 bits.

    Every 50th round is exchanged in full precision. Options make it the paper's Marsit, one bit on every hop.

    Args:
        full_precision_every: K, in rounds: rounds 0, K, 2K, ... are exchanged in full precision; 0 for never.
        step_size: "tensor" or "row" for a step measured per tensor or per output row (short rows
            are joined until they hold 64 elements), or a number, the paper's fixed global step.
        compensation: the residual rule: "own" (ordinary error feedback), "global" (the paper's) or "none".
        residual_decay: factor of an "own" residual from round to round, above 0, at most 1; None for 1 with shaped and
            0.9 with sampled merging. Below 1, old errors decay instead of returning all at once, as high learning
            rates with momentum need; 1 is ordinary error feedback. "global" always keeps everything.
        zeros: what exact zeros send: a "random" bit, or "positive" as in the paper. Gradients of
            unused embedding rows are exact zeros, and with "positive" all of them drift the same way.
        merge: "shaped" keeps what a merge rounds off and adds it the next time, so that over the steps the merged
            bits follow the mean of the signs, and draws nothing; "sampled" is the paper's random merge, which is
            unbiased in every step.
        step_scale: the measured step in units of the mean of |x|, above 0 and below 2; None for 1.5 with shaped merging
            and an "own" residual, else 1. Between two ranks, where owners round nothing off, None is 1.8 for what SGD
            moves, and for what a second moment is held of.
        levels: number of values that an owner, which sees the bits of all ranks, may pass on: 3 are -1, 0 and 1, in
            1.6 bits, and keep what one bit must leave to later steps; 2 is the paper's bit. None for 3 with shaped
            merging, which ``exchange="auto"`` then gives to owners; in a ring, every hop passes on one bit.
        residual_dtype: "float32" (float64 for float64 gradients), or "bfloat16" for 2 bytes an element, rounded at
            random and so right on average.
        full_precision_dtype: what full-precision rounds send: "float32" (float64 for float64 gradients), or "bfloat16"
            for half of the bytes in place of float32; what it rounds off is not kept.
    """

    full_precision_every: int = FULL_PRECISION_EVERY
    step_size: Literal["tensor", "row"] | float = "row"
    compensation: Feedback = "own"
    zeros: Literal["random", "positive"] = "random"
    residual_decay: float | None = None
    merge: Literal["shaped", "sampled"] = "shaped"
    step_scale: float | None = None
    levels: Literal[2, 3] | None = None
    residual_dtype: ResidualDtype = "float32"
    full_precision_dtype: Literal["float32", "bfloat16"] = "float32"

    name: ClassVar[str] = "marsit"
    algebra: ClassVar[Algebra] = Algebra.MERGE
    wire_version: ClassVar[int] = 3
    exact_first: ClassVar[bool] = True
    summary: ClassVar[str] = "1 bit: signs, merged to 1.6 bits by owners or to a bit on every hop, with error feedback"
    source: ClassVar[str] = "Wu et al., DAC 2022, arXiv:2204.06787"
    page: ClassVar[str] = "marsit.md"

    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"merge": "shaped", "step_size": "row", "full_precision_every": 3, "levels": 2},
        {"merge": "shaped", "step_size": "row", "full_precision_every": 3, "levels": 3},
        {"merge": "sampled", "step_size": "row", "full_precision_every": 0, "zeros": "random"},
        {"merge": "sampled", "step_size": "tensor", "full_precision_every": 3, "compensation": "global"},
        {"merge": "sampled", "step_size": "tensor", "full_precision_every": 0, "compensation": "none"},
        {"merge": "sampled", "step_size": 0.125, "full_precision_every": 0, "zeros": "positive"},
        {"full_precision_every": 3, "residual_dtype": "bfloat16"},
        {"full_precision_every": 3, "full_precision_dtype": "bfloat16"},
    )

    def __post_init__(self) -> None:
        every = self.full_precision_every
        if not whole(every) or every < 0:
            raise ConfigError(f"full_precision_every should be 0 (never) or a whole number of steps, got {every!r}")
        check_step(self.step_size)
        rules = get_args(Feedback)
        if self.compensation not in rules:
            raise ConfigError(f"compensation should be one of {', '.join(map(repr, rules))}, got {self.compensation!r}")
        check_choice("zeros", self.zeros, "random", "positive")
        check_choice("merge", self.merge, "shaped", "sampled")
        check_residual_dtype(self.residual_dtype, self.compensation != "none")
        check_choice("full_precision_dtype", self.full_precision_dtype, "float32", "bfloat16")
        self._choose()
        decay, scale = self.residual_decay, self.step_scale
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay <= 1:
            raise ConfigError(f"residual_decay should be a number above 0, at most 1, got {decay!r}")
        if scale is not None:
            check_step_scale(scale)
        if self.levels not in ((2, 3) if self.merge == "shaped" else (2,)):
            raise ConfigError(f'levels should be 2, or 3 with merge="shaped", got {self.levels!r}')
        if scale != 1 and not self._measured():
            raise ConfigError(
                'step_scale applies to a measured step, step_size="row" or "tensor"; a number is the step itself'
            )

    def _choose(self) -> None:
        """Fill in what depends on other options alone, so that ranks and checkpoints compare what is in force."""
        loses_nothing = self.merge == "shaped" and self.compensation == "own"
        if self.residual_decay is None:
            object.__setattr__(self, "residual_decay", 1.0 if loses_nothing else 0.9)
        if self.levels is None:
            object.__setattr__(self, "levels", 3 if self.merge == "shaped" else 2)
        large = loses_nothing and self._measured()
        if self.step_scale is None and not large:  # a large one depends on the number of ranks, too
            object.__setattr__(self, "step_scale", 1.0)

    def properties(self) -> Properties:
        mean = "sum over steps of result / step" if self.merge == "shaped" else "E[result / step]"
        epsilon = max(epsilon_of(self.residual_dtype), self._exact().properties().law.epsilon)
        conserves, bound = self.compensation == "global", f"{mean} = that of the mean of signs"
        return replace(
            super().properties(),
            law=Law(conserves=conserves, epsilon=epsilon, bound=bound, few_exact=self._ternary()),
            feedback=self.compensation,
            stands_for_mean=self._measured(),  # results are then of the gradients' size
            variants=(self, self._exact()) if self.full_precision_every else (),
            full_precision_every=self.full_precision_every,
        )

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return replace(
            super().layout(bucket, world),
            state=residual_state(bucket, self.residual_dtype) if self.compensation != "none" else {},
            carries={"bits": ops.count_rows(world)} if self.merge == "shaped" else {},
        )

    def for_step(self, step: int, *, without: int = 0) -> Codec:
        every = self.full_precision_every
        exact = every and step % every == 0 and not 0 < without <= every
        return self._exact() if exact else self

    def _exact(self) -> Codec:
        return ShortFullPrecision() if self.full_precision_dtype == "bfloat16" else FullPrecision()

    # ---- one round ----

    def combine(self, work: Work, piece: Piece, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        into = piece.values
        if piece.region == "steps":
            ops.dense_add(into, other)
        elif self.merge == "sampled":
            ops.merge_bits(into, other, *weights, key, word_offset=piece.start)
        else:
            before, after = work.carry_of(piece.region, weights).rows(piece.start, piece.start + into.numel())
            ops.shaped_merge(into, other, before, after, sum(weights) // weights[0])  # in units of the own payload

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        if self.merge == "shaped" and piece.region == "bits":
            shaped_fold(work, piece, others, ternary=self._ternary())
        else:
            super().fold(work, piece, others, key)

    def _ternary(self) -> bool:
        return self.levels == 3

    def _rule(self) -> ops.Feedback:
        return self.compensation

    def _scale(self, work: Work, positions: Sequence[int]) -> float:
        if self.step_scale is not None:
            return self.step_scale
        # An optimizer that squares what it gets takes the noise of larger steps for gradient, and steps less.
        bears = any(position in work.divisors or position in work.linear for position in positions[:1])
        loses_nothing = work.world == PAIR and self._ternary() and "bits" in work.results
        return LARGER_STEP if bears and loses_nothing else LARGE_STEP

    def _decay(self) -> float:
        assert self.residual_decay is not None  # see _choose
        return self.residual_decay if self.compensation == "own" else 1.0
