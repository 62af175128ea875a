"""Codes of a few bits for each element, on scales that a prelude finds: what the methods that round so share.

A *row* is the elements of a tensor that share a scale: blocks of it, or all of it. The scales are the
norms of rows over all ranks, or the norm of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import ops
from ...ops.keys import Key
from ...schedule.plan import Bucket, TensorSpec
from ..base import Codec, Piece
from ..work import Counts, Cutting, Layout, Part, Work, slices, work_dtype
from .rounding import key_of

#: Blocks are whole chunks of the kernels; a scale of 32 bits then costs 1/8 bit per element at most.
BLOCK_UNIT = 256


@dataclass(frozen=True)
class Rows:
    """Which elements share a scale, and how that is found.

    Attributes:
        power: which power of ``|x|`` a rank's norm adds up; 0 for the maximum.
        block: how many elements make a row; 0 for all of a tensor.
        one_scale: all rows of a bucket have one scale; None: where there are no blocks.
        across: which power of the ranks' norms is added up over the ranks, likewise; None: the same.
    """

    power: int = 0
    block: int = 0
    one_scale: bool | None = None
    across: int | None = None

    @property
    def over_ranks(self) -> int:
        """Which power of the ranks' norms is added up; 0 for the maximum."""
        return self.power if self.across is None else self.across

    @property
    def adds(self) -> bool:
        """Whether anything is added up, which takes float64."""
        return bool(self.power or self.over_ranks)

    @property
    def shared(self) -> bool:
        """Whether all rows of a bucket have one scale."""
        return not self.block if self.one_scale is None else self.one_scale

    def number(self, tensor: TensorSpec) -> int:
        """Return how many rows a tensor has."""
        return -(-tensor.count // self.block) if self.block else 1

    def length(self, tensor: TensorSpec) -> int:
        """Return how many elements a row has."""
        return self.block or max(1, tensor.count)

    def granule(self, tensor: TensorSpec) -> int:
        """Return of how many elements parts are multiples: whole rows, where a tensor has several."""
        return self.block if 0 < self.block < tensor.count else BLOCK_UNIT


class Dithering(Codec):
    """The norms, and where codes lie; how numbers become codes is the method's own business."""

    bits: int  # the fields of the methods
    rounding: str = "independent"
    batched: ClassVar[bool] = True

    @property
    def rows(self) -> Rows:
        """Which elements share a scale."""
        return Rows()

    # ---- layout ----

    def layout(self, bucket: Bucket, world: int) -> Layout:
        rows = self.rows
        number, own = sum(map(rows.number, bucket.tensors)), work_dtype(bucket)
        scales = 1 if rows.shared else number
        return Layout(
            {"codes": ops.code_layout(self.bits, bucket.padded)},
            preludes=({"norms": (torch.float64 if rows.adds else own, scales)},),
            local={"parts": (torch.float64 if rows.power else own, number), "scales": (own, scales)},
            cutting=Cutting([rows.granule(tensor) for tensor in bucket.tensors], self._needs, encoding=True),
        )

    def prepare(self, work: Work) -> None:
        rows, tensors = self.rows, work.bucket.tensors
        parts = slices([rows.number(tensor) for tensor in tensors])
        work.memo["parts"], work.memo["lengths"] = parts, [rows.length(tensor) for tensor in tensors]
        # An empty tensor may have a place, but no row that could be measured.
        placed = zip(parts, tensors, strict=True)
        work.memo["rows"] = [own if tensor.count else slice(own.start, own.start) for own, tensor in placed]
        work.memo["scales"] = [0 if rows.shared else own.start for own in parts]

    def _place(self, work: Work, part: Part, bits: int) -> slice:
        """Return where the codes of a part lie. Tensors and their parts start at whole bytes."""
        own = work.place(part)
        return slice(*(ops.code_layout(bits, element)[1] for element in (own.start, own.stop)))

    # ---- norms ----

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        rows, lengths, norms = self.rows, work.memo["lengths"], self._rows_of("parts", work, positions)
        of_rows = [lengths[position] for position in positions]
        counts = ops.norm_offer_all(self._values(work, positions, key), norms, of_rows, power=rows.power)
        if not rows.adds or work_dtype(work.bucket) is not torch.float64:
            return counts
        norms = [_of_rank(mine.clone(), rows) for mine in norms]
        # There are numbers whose powers float64 cannot hold: a block of NaN, which would not be counted.
        return [int(n) or int(not bool(mine.isfinite().all())) for n, mine in zip(counts, norms, strict=True)]

    def _values(self, work: Work, positions: Sequence[int], key: Key) -> list[Tensor]:
        """Return what is sent of some tensors, flat."""
        return [work.grad(position) for position in positions]

    def _rows_of(self, name: str, work: Work, positions: Sequence[int]) -> list[Tensor]:
        """Return what a local array holds for the rows of some tensors: nothing for an empty one."""
        array, rows = work.local[name], work.memo["rows"]
        return [array[rows[position]] for position in positions]

    def before(self, number: int, work: Work, key: Key) -> None:
        if number == 0:
            self._measure(work)
        else:
            self._make_scales(work)

    def _measure(self, work: Work) -> None:
        """Write the norms of this rank."""
        parts, norms = work.local["parts"], work.shared["norms"]
        for position, own in enumerate(work.memo["parts"]):
            if work.grads[position] is None:
                parts[own] = 0  # what an earlier step left
        if self.rows.shared:
            norms[0] = _added(parts) if self.rows.power else parts.max()
        else:
            norms.copy_(parts)
        _of_rank(norms, self.rows)

    def combine(self, work: Work, piece: Piece, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        if piece.region != "norms":
            self._combine(piece.start, piece.values, other, key)
        elif self.rows.over_ranks:
            ops.dense_add(piece.values, other)
        else:
            torch.maximum(piece.values, other, out=piece.values)

    def _combine(self, start: int, into: Tensor, other: Tensor, key: Key) -> None:
        raise NotImplementedError

    # ---- codes ----

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        codes = self._codes(work, parts, work.regions["codes"], self.bits)
        drawn = key_of(key, work.world, self.rounding == "correlated")
        given = (*self._scaled(work, parts), codes, drawn)
        self._encode(work, parts, *given, offsets=[work.place(part).start for part in parts])

    def _make_scales(self, work: Work) -> None:
        norms = work.shared["norms"]
        _take_roots(norms, self.rows.over_ranks)
        scales = work.local["scales"].copy_(norms)
        if norms.dtype is torch.float64 and scales.dtype is torch.float32:
            scales.clamp_(max=torch.finfo(torch.float32).max)  # no element is larger

    def _scaled(self, work: Work, parts: Sequence[Part]) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Return parts of the gradients, their scales, and how many elements share one."""
        every, rows = work.local["scales"], [work.memo["lengths"][part.position] for part in parts]
        firsts = [work.memo["scales"][part.position] for part in parts]
        own = zip(parts, firsts, rows, strict=True)
        scales = [every[at + part.start // row : at - (-part.stop // row)] for part, at, row in own]
        return work.grads_of(parts), scales, rows

    def _codes(self, work: Work, parts: Sequence[Part], codes: Tensor, bits: int) -> list[Tensor]:
        return [codes[self._place(work, part, bits)] for part in parts]

    def _encode(self, work: Work, parts: Sequence[Part], *given: Any, offsets: list[int]) -> None:
        """Write the codes of parts of tensors.

        Args:
            given: the parts of the gradients, scales, elements that share one, where codes go, and the key.
            offsets: where the parts lie in the bucket, for random bits.
        """
        raise NotImplementedError

    def _needs(self, work: Work, part: Part) -> dict[str, tuple[int, int]]:
        codes = self._place(work, part, self.bits)
        return {"codes": (codes.start, codes.stop)}  # scales are known since the prelude

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        grads, scales, rows = self._scaled(work, parts)
        codes = self._codes(work, parts, work.regions["codes"], self.bits)
        self._decode(codes, scales, rows, grads, world=work.world, result_scale=result_scale)

    def _decode(self, *given: Any, world: int, result_scale: float) -> None:
        """Write the results of parts of tensors.

        Args:
            given: codes, scales, elements that share one, and parts of the gradients.
        """
        raise NotImplementedError


class Uniform(Dithering):
    """Codes are whole numbers on evenly spaced levels, and add."""

    def levels(self, world: int) -> int:
        """Return the code of the norm."""
        raise NotImplementedError

    def _bounds(self, work: Work, parts: Sequence[Part]) -> list[Tensor] | None:
        """Return where gradients are cut off; None for nowhere."""
        return None

    def _encode(self, work: Work, parts: Sequence[Part], *given: Any, offsets: list[int]) -> None:
        levels, bounds = self.levels(work.world), self._bounds(work, parts)
        ops.uniform_encode_all(*given, bits=self.bits, levels=levels, offsets=offsets, bounds=bounds)

    def _combine(self, start: int, into: Tensor, other: Tensor, key: Key) -> None:
        ops.uniform_add(into, other, bits=self.bits)

    def _decode(self, *given: Any, world: int, result_scale: float) -> None:
        ops.uniform_decode_all(*given, bits=self.bits, scale=result_scale / (self.levels(world) * world))


class PowersOfTwo(Dithering):
    """Codes are signs and exponents, with a mantissa or without."""

    mantissa: int = 0

    def headroom(self, world: int) -> int:
        """Return the exponent of the norm."""
        raise NotImplementedError

    def _encode(self, work: Work, parts: Sequence[Part], *given: Any, offsets: list[int]) -> None:
        ops.exponential_encode_all(*given, **self._rule(work.world), offsets=offsets)

    def _decode(self, *given: Any, world: int, result_scale: float) -> None:
        ops.exponential_decode_all(*given, **self._rule(world), scale=result_scale / world)

    def _rule(self, world: int) -> dict[str, Any]:
        return {"bits": self.bits, "headroom": self.headroom(world), "mantissa": self.mantissa}


def _of_rank(norms: Tensor, rows: Rows) -> Tensor:
    """Turn, in place, sums of powers of ``|x|`` into what is added or compared over the ranks."""
    if rows.power != rows.over_ranks:
        _take_roots(norms, rows.power)
        for _ in range(rows.over_ranks.bit_length() - 1):
            norms.mul_(norms)
    return norms


def _take_roots(sums: Tensor, power: int) -> None:
    """Take roots by square roots."""
    for _ in range(power.bit_length() - 1 if power else 0):
        ops.take_roots(sums)


def _added(parts: Tensor) -> float:
    """Add one by one: the order of torch's own sum depends on the machine."""
    total = 0.0
    for part in parts.tolist():
        total += part
    return total
