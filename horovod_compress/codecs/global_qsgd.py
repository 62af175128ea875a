"""Global-QSGD: quantised gradients on one scale for all ranks, so that codes can be added.

ArXiv:2305.18627, ECAI 2025.

    N = the norm of a block over all ranks: the largest |x|, or (sum over ranks and elements of |x|^p)^(1/p)
    standard:     code = x / N * s rounded up or down at random without bias, s = (2^(bits-1) - 1) // M
                  codes are added as integers; result = N / (s M) * code
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
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import Key
from ..schedule.plan import Bucket
from .base import Algebra, Piece, Properties
from .law import Law
from .layout import Layout
from .registry import register
from .shared.dithering import BLOCK_UNIT, Dithering, Rows, Scaled, whole
from .shared.forms import ByForm
from .work import Work

_MOST_BLOCK = 1 << 30


@dataclass(frozen=True)
class _Form(Dithering):
    """What both kinds of dithering share."""

    bits: int
    norm: str | int
    block: int

    name: ClassVar[str] = "global_qsgd"

    @property
    def rows(self) -> Rows:
        return Rows(0 if self.norm == "max" else int(self.norm), self.block)


@dataclass(frozen=True)
class Standard(_Form):
    """Evenly spaced levels: codes are integers, and add."""

    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "integers on one scale for all ranks, added"

    def levels(self, world: int) -> int:
        """Return the code of the norm: sums over all ranks just fit."""
        return ((1 << (self.bits - 1)) - 1) // world

    def properties(self) -> Properties:
        bound = "d N^2 / (4 s^2 M), N the norm, s the levels"
        return replace(super().properties(), law=Law(unbiased=True, bound=bound, error=self._error))

    def _error(self, x: Sequence[Tensor]) -> float:
        world, count, power = len(x), x[0].numel(), self.rows.power
        total = 0.0
        for start in range(0, count, self.block or max(1, count)):
            block = torch.stack([one[start : start + self.block] if self.block else one for one in x])
            norm = block.abs().max() if not power else block.abs().pow(power).sum().pow(1 / power)
            total += block.shape[1] * float(norm) ** 2 / (4 * self.levels(world) ** 2 * world)
        return total

    def layout(self, bucket: Bucket, world: int) -> Layout:
        if self.levels(world) < 1:
            enough = next((bits for bits in (8, 16) if 1 << (bits - 1) > world), None)
            advice = f"bits={enough}" if enough else 'dithering="exponential", bits=8'
            raise ConfigError(
                f"global_qsgd with bits={self.bits} has no level left for each of {world} ranks, as sums "
                f"have to fit in {self.bits} bits; choose {advice}"
            )
        return super().layout(bucket, world)

    def _encode(
        self, work: Work, positions: Sequence[int], given: Scaled, codes: list[Tensor], key: Key, offsets: list[int]
    ) -> None:
        levels = self.levels(work.world)
        ops.level_encode_all(*given, codes, key, bits=self.bits, levels=levels, offsets=offsets)

    def _combine(self, start: int, into: Tensor, other: Tensor, key: Key) -> None:
        ops.level_add(into, other, bits=self.bits)

    def _decode(self, given: Scaled, grads: list[Tensor], world: int, result_scale: float) -> None:
        scale = result_scale / (self.levels(world) * world)
        ops.level_decode_all(*given, grads, bits=self.bits, scale=scale)


@dataclass(frozen=True)
class Exponential(_Form):
    """Powers of two: codes are signs and exponents, and merge in a tree."""

    algebra: ClassVar[Algebra] = Algebra.FOLD
    summary: ClassVar[str] = "powers of two on one scale for all ranks, merged in a tree"

    def headroom(self, world: int) -> int:
        """Return the exponent of the norm: a tree over all ranks takes it down to 1 at most."""
        return 1 + (world - 1).bit_length()

    def properties(self) -> Properties:
        bound = "M^0.17 |x|^2 / 8, and of values below the smallest power"
        return replace(super().properties(), law=Law(unbiased=True, bound=bound))

    def layout(self, bucket: Bucket, world: int) -> Layout:
        most = 1 << ((1 << (self.bits - 1)) - 2)
        if world > most:
            raise ConfigError(
                f"global_qsgd with exponential dithering and bits={self.bits} supports at most {most} ranks, "
                f"got {world}; choose bits=8"
            )
        return super().layout(bucket, world)

    def _encode(
        self, work: Work, positions: Sequence[int], given: Scaled, codes: list[Tensor], key: Key, offsets: list[int]
    ) -> None:
        headroom = self.headroom(work.world)
        ops.octave_encode_all(*given, codes, key, bits=self.bits, headroom=headroom, offsets=offsets)

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
        ops.octave_merge(into, other, key, bits=self.bits, offset=offset)

    def _decode(self, given: Scaled, grads: list[Tensor], world: int, result_scale: float) -> None:
        headroom = self.headroom(world)
        ops.octave_decode_all(*given, grads, bits=self.bits, headroom=headroom, scale=result_scale / world)


@register
@dataclass(frozen=True)
class GlobalQsgd(ByForm):
    """Unbiased quantisation on one scale for all ranks.

    Args:
        dithering: "standard" rounds to evenly spaced levels, whose codes add; "exponential" to
            powers of two, which keeps small values and is exchanged by the fold.
        bits: bits per element: 4 or 8, and 16 with standard dithering only.
        norm: "max" for the largest magnitude over all ranks, or p = 1, 2 or 4 for the p-norm of all
            ranks' elements together.
        block: number of elements that share a scale, a multiple of 256; 0 for one scale per bucket.
    """

    dithering: str = "standard"
    bits: int = 8
    norm: str | int = "max"
    block: int = 2048

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
    )

    def __post_init__(self) -> None:
        if self.dithering not in ("standard", "exponential"):
            raise ConfigError(f'dithering should be "standard" or "exponential", got {self.dithering!r}')
        if not whole(self.bits) or self.bits not in (4, 8, 16):
            raise ConfigError(f"bits should be 4, 8 or 16, got {self.bits!r}")
        if self.dithering == "exponential" and self.bits == 16:
            raise ConfigError(
                "bits should be 4 or 8 with exponential dithering, as 8 bits already hold 96 octaves and a "
                'sign, got 16; for more precision choose dithering="standard"'
            )
        if self.norm != "max" and not (whole(self.norm) and self.norm in (1, 2, 4)):
            raise ConfigError(f'norm should be "max", 1, 2 or 4, got {self.norm!r}')
        if not whole(self.block) or not 0 <= self.block <= _MOST_BLOCK or self.block % BLOCK_UNIT:
            raise ConfigError(
                f"block should be 0 or a multiple of {BLOCK_UNIT}, at most {_MOST_BLOCK}, got {self.block!r}"
            )

    @cached_property
    def form(self) -> _Form:
        kind = Standard if self.dithering == "standard" else Exponential
        return kind(self.bits, self.norm, self.block)
