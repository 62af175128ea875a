"""Global-QSGD: quantised gradients on one scale for all ranks, so that codes can be added.

ArXiv:2305.18627, ECAI 2025.

    N = the norm of a block over all ranks: the largest |x|, or (sum over ranks of |x_m|_q^p)^(1/p)
    standard:     code = x / N * s rounded up or down at random without bias, s = (2^(bits-1) - 1) // M or an option
                  codes are added as integers; result = N / (s M) * code
                  where s is given, a rank sends its codes in as few bits as they need, and owners the sums in `bits`
    exponential:  code = sign and exponent of x / N rounded to a power of two, likewise
                  two codes with exponents e1 <= e2, D = e2 - e1, become one:
                      equal signs:    e1 - 1 with probability 2^-D, else e1
                      opposite signs: zero where D = 0; e1 + 1 with probability 2^-(D-1), else e1
                  merged in a balanced tree over the ranks; result = N / M * code

N takes a small exchange of its own before the payload's. Both roundings are unbiased, so there is no
residual.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import Key
from ..schedule.plan import ALIGNMENT, Bucket
from .base import Algebra, ByForm, Law, Piece, Properties, check_choice, whole
from .registry import register
from .shared.averaging import AveragedUniform
from .shared.dithering import BLOCK_UNIT, Dithering, PowersOfTwo, Rows, Uniform
from .shared.rounding import PLAIN, Average, average_of, check_feedback, excess
from .work import Layout, Part, Work

_MOST_BLOCK = 1 << 30


def _power(norm: str | int) -> int:
    return 0 if norm == "max" else int(norm)


def _norm(values: Tensor, power: int) -> Tensor:
    """Return the norm over the first dimension."""
    return values.abs().pow(power).sum(0).pow(1 / power) if power else values.abs().amax(0)


@dataclass(frozen=True)
class _Dithered(Dithering):
    """What both kinds of dithering share."""

    bits: int
    norm: str | int
    block: int
    across: str | int | None = None
    rounding: str = "independent"

    name: ClassVar[str] = "global_qsgd"

    @property
    def rows(self) -> Rows:
        return Rows(_power(self.norm), self.block, across=None if self.across is None else _power(self.across))


@dataclass(frozen=True)
class Standard(_Dithered, Uniform):
    """Evenly spaced levels: codes are integers, and add."""

    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "integers on one scale for all ranks, added"

    def levels(self, world: int) -> int:
        """Return the code of the norm: sums over all ranks just fit."""
        return ((1 << (self.bits - 1)) - 1) // world

    def properties(self) -> Properties:
        bound = "d N^2 / (4 s^2 M), N the norm, s the levels"
        return replace(super().properties(), law=Law(unbiased=True, bound=bound, error=self._error, zeros=True))

    def _error(self, x: Sequence[Tensor]) -> float:
        world, count, rows = len(x), x[0].numel(), self.rows
        total = 0.0
        for start in range(0, count, self.block or max(1, count)):
            block = torch.stack([one[start : start + self.block] if self.block else one for one in x])
            norm = _norm(_norm(block.T, rows.power), rows.over_ranks)
            step = float(norm) / self.levels(world)
            total += block.shape[1] * step**2 / (4 * world)
            if self.rounding == "correlated":
                total += excess(block.shape[1], step, float(block.abs().sum()), world)
        return total

    def layout(self, bucket: Bucket, world: int) -> Layout:
        if self.levels(world) < 1:
            enough = next((bits for bits in (8, 16) if 1 << (bits - 1) > world), None)
            advice = f"bits={enough}" if enough else 'dithering="exponential", bits=8'
            raise ConfigError(
                f"global_qsgd with bits={self.bits} leaves no level for each of {world} ranks, because sums must fit "
                f"in {self.bits} bits; choose {advice}"
            )
        return super().layout(bucket, world)


@dataclass(frozen=True)
class Narrow(Standard):
    """Codes of fewer bits than their sums need: owners add them, and pass the sums on in ``sum_bits``."""

    most: int = 1
    sum_bits: int = 8

    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "integers on one scale for all ranks, packed, and added by owners"

    def levels(self, world: int) -> int:
        return self.most

    def layout(self, bucket: Bucket, world: int) -> Layout:
        room = (1 << (self.sum_bits - 1)) - 1
        if self.most * world > room:
            advice = f"levels={room // world}" if world <= room else "more bits"
            raise ConfigError(
                f"global_qsgd with levels={self.most} and bits={self.sum_bits} supports at most {room // self.most} "
                f"ranks, because sums must fit in {self.sum_bits} bits, got {world}; choose {advice}"
            )
        records = {"codes": ALIGNMENT // 8 * self.bits}
        results = {"codes": ops.code_layout(self.sum_bits, bucket.padded)}
        return replace(super().layout(bucket, world), records=records, results=results)

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        if piece.region == "norms":
            super().fold(work, piece, others, key)
            return
        count = piece.values.numel() * 8 // self.bits
        ops.uniform_fold([piece.values, *others], piece.result, count, bits=self.bits, sum_bits=self.sum_bits)

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        sums = work.results.get("codes")  # one rank has only its own
        codes, bits = (work.regions["codes"], self.bits) if sums is None else (sums, self.sum_bits)
        grads, scales, rows = self._scaled(work, parts)
        scale = result_scale / (self.most * work.world)
        ops.uniform_decode_all(self._codes(work, parts, codes, bits), scales, rows, grads, bits=bits, scale=scale)


@dataclass(frozen=True)
class AveragedStandard(AveragedUniform, Standard):
    """Standard dithering to the nearest level, with what is kept of earlier errors."""

    average: Average = PLAIN


@dataclass(frozen=True)
class AveragedNarrow(AveragedUniform, Narrow):
    """The same with packed codes."""

    average: Average = PLAIN


@dataclass(frozen=True)
class Exponential(_Dithered, PowersOfTwo):
    """Powers of two: codes are signs and exponents, and merge in a tree."""

    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "powers of two on one scale for all ranks, merged in a tree"

    def headroom(self, world: int) -> int:
        """Return the exponent of the norm: a tree over all ranks takes it down to 1 at most."""
        return 1 + (world - 1).bit_length()

    def properties(self) -> Properties:
        bound = "M^0.17 |x|^2 / 8, and of values below the smallest power"
        return replace(super().properties(), law=Law(unbiased=True, bound=bound, zeros=True))

    def layout(self, bucket: Bucket, world: int) -> Layout:
        most = 1 << ((1 << (self.bits - 1)) - 2)
        if world > most:
            raise ConfigError(
                f"global_qsgd with exponential dithering and bits={self.bits} supports at most {most} ranks, "
                f"got {world}; choose bits=8"
            )
        return super().layout(bucket, world)

    def fold(self, work: Work, piece: Piece, others: Sequence[Tensor], key: Key) -> None:
        """Merge neighbours, then neighbours of these, and so on: ceil(log2 M) merges for each rank at most.

        Every merge may multiply the second moment by 9/8; in a ring that would happen M-1 times.
        """
        if piece.region == "norms":
            super().fold(work, piece, others, key)
            return
        ranks = [*others[: key.rank], piece.values, *others[key.rank :]]
        step, node = 1, 0
        while step < len(ranks):
            for left in range(0, len(ranks) - step, 2 * step):
                self._combine(piece.start, ranks[left], ranks[left + step], key.at(hop=node))
                node += 1
            step *= 2
        if ranks[0] is not piece.values:
            piece.values.copy_(ranks[0])

    def _combine(self, start: int, into: Tensor, other: Tensor, key: Key) -> None:
        offset = start * (2 if self.bits == 4 else 1)
        ops.exponential_merge(into, other, key, bits=self.bits, offset=offset)


@register
@dataclass(frozen=True)
class GlobalQsgd(ByForm):
    """Eight bits per element: unbiased integers on one scale for all ranks, which add.

    Args:
        dithering: "standard" rounds to evenly spaced levels, whose codes add; "exponential" to
            powers of two, which keeps small values and is exchanged by the fold.
        bits: bits per element: 4 or 8, and 16 with standard dithering only; with ``levels`` those of a sum, 3 to 8.
        norm: "max" for the largest magnitude over all ranks, or p = 1, 2 or 4 for the p-norm of all
            ranks' elements together.
        block: number of elements that share a scale, a multiple of 256; 0 for one scale per bucket.
        across: the norm over the ranks' norms, if not ``norm``: "max", 1, 2 or 4. None for ``norm``.
        levels: s, the code of the norm. A rank then sends codes of log2(s + 1) + 1 bits, rounded up, and owners send
            the sums in ``bits``. The largest s that leaves room for all ranks is (2^(bits-1) - 1) // M: as exact as
            None, in fewer bytes. None for that s and codes of ``bits`` everywhere, which any exchange can add.
        rounding: with standard dithering, "independent" for random bits of each rank's own; "correlated" spreads them
            over the ranks, so that errors cancel; "nearest" with feedback.
        feedback: "none", or "average" to add a fading average of earlier errors.
        beta: what share of that average stays in a step; 0 for plain error feedback. None for 0.8 with feedback.
        reset_every: after how many steps all errors are forgotten, 0 for never. None for 1024 with feedback.
        residual_bits: bits of an error that is kept, 2 to 8. None for 8 with feedback.
    """

    dithering: Literal["standard", "exponential"] = "standard"
    bits: int = 8
    norm: Literal["max", 1, 2, 4] = "max"
    block: int = 2048
    across: Literal["max", 1, 2, 4] | None = None
    levels: int | None = None
    rounding: Literal["independent", "correlated", "nearest"] = "independent"
    feedback: Literal["none", "average"] = "none"
    beta: float | None = None
    reset_every: int | None = None
    residual_bits: int | None = None

    name: ClassVar[str] = "global_qsgd"
    summary: ClassVar[str] = "4, 8 or 16 bits: unbiased, on one scale for all ranks"
    source: ClassVar[str] = "Xin et al., ECAI 2025, arXiv:2305.18627"
    page: ClassVar[str] = "global_qsgd.md"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"dithering": "standard", "bits": 4, "block": 0},
        {"dithering": "standard", "bits": 8, "block": 256},
        {"dithering": "standard", "bits": 16, "norm": 2},
        {"dithering": "exponential", "bits": 4},
        {"dithering": "exponential", "bits": 8, "block": 256},
        {"dithering": "standard", "bits": 8, "norm": 2, "across": "max"},
        {"dithering": "standard", "bits": 8, "levels": 31},
        {"dithering": "standard", "bits": 4, "rounding": "correlated"},
        {"bits": 8, "block": 256, "rounding": "nearest", "feedback": "average"},
        {"bits": 8, "levels": 31, "rounding": "nearest", "feedback": "average", "residual_bits": 6},
    )

    def __post_init__(self) -> None:
        check_choice("dithering", self.dithering, "standard", "exponential")
        self._check_bits()
        check_choice("rounding", self.rounding, "independent", "correlated", "nearest")
        if self.rounding != "independent" and self.dithering != "standard":
            raise ConfigError(
                f'rounding="{self.rounding}" is for dithering="standard", got "exponential", whose merges round once '
                "more: leave one of the two out"
            )
        check_feedback(self, "global_qsgd")
        for name in ("norm", "across"):
            value = getattr(self, name)
            known = value == "max" or (whole(value) and value in (1, 2, 4))
            if not known and (name == "norm" or value is not None):
                raise ConfigError(f'{name} should be "max", 1, 2 or 4, got {value!r}')
        if self.across == self.norm:
            object.__setattr__(self, "across", None)  # ranks and checkpoints compare what is in force
        if not whole(self.block) or not 0 <= self.block <= _MOST_BLOCK or self.block % BLOCK_UNIT:
            raise ConfigError(
                f"block should be 0 or a multiple of {BLOCK_UNIT}, at most {_MOST_BLOCK}, got {self.block!r}"
            )

    def _check_bits(self) -> None:
        bits, levels = self.bits, self.levels
        if levels is None:
            check_choice("bits", bits, 4, 8, 16)
            if self.dithering == "exponential" and bits == 16:
                raise ConfigError(
                    "bits should be 4 or 8 with exponential dithering, as 8 bits already hold 96 powers of two and a "
                    'sign, got 16; for more precision choose dithering="standard"'
                )
        elif self.dithering != "standard":
            raise ConfigError(f'levels is for dithering="standard", got {levels!r} with {self.dithering!r}')
        elif not whole(bits) or not 3 <= bits <= 8:
            raise ConfigError(f"bits should be a whole number from 3 to 8 with levels, got {bits!r}")
        elif not whole(levels) or not 1 <= levels < 1 << (bits - 1):
            raise ConfigError(f"levels should be from 1 to {(1 << (bits - 1)) - 1} with bits={bits}, got {levels!r}")

    @cached_property
    def form(self) -> _Dithered:
        form = self.norm, self.block, self.across, self.rounding
        if self.dithering != "standard":
            return Exponential(self.bits, *form)
        average, levels = average_of(self), self.levels
        if levels is None:
            return AveragedStandard(self.bits, *form, average) if average else Standard(self.bits, *form)
        narrow = levels.bit_length() + 1, *form, levels, self.bits
        return AveragedNarrow(*narrow, average) if average else Narrow(*narrow)
