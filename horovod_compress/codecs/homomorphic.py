"""Homomorphic: the values where any rank has one, which add; nothing is lost.

After lossless homomorphic compression, Li et al., arXiv:2402.07529. There, ranks OR a bitmap of their elements that are
not zero, and hash values into a table of 1.3 cells for each, which adds; what does not peel out of it again is sent
otherwise. But once every rank knows all positions, values can be sent in their order, without hashes:

    U = the elements that are not zero on some rank; with blocks, all elements of a block that holds one;
        all of a tensor, where more than 7/8 of its bits are 1
    prelude = a bit for each element, or for each block of consecutive elements of a tensor; these become equal by OR
    payload = the gradient at U, in order: these add
    result  = mean over ranks at U, 0 elsewhere

Nothing is kept from round to round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError, CorruptFrameError
from ..ops.keys import Key
from ..schedule.plan import Bucket, TensorSpec
from .base import Algebra, Codec, Law, Piece, Properties, whole
from .registry import register
from .shared.bits import AT_A_TIME, ones, packed, set_bits
from .work import Counts, Layout, Part, Work, together, work_dtype

#: Blocks may be as long as this; longer ones save no more bytes.
_MOST_BLOCK = 1 << 16
#: Tensors of whose bits more are 1 are sent whole, so that nobody looks for the elements; it takes few more bytes.
_NEARLY_ALL = 7 / 8

#: A tensor's position, where in the payload its values are, and of which elements these are, None for all.
_Place = tuple[int, slice, Tensor | None]


@register
@dataclass(frozen=True)
class Homomorphic(Codec):
    """The exact mean of gradients that are mostly zeros: a bit for each element, and values where any rank has one.

    Args:
        block: consecutive elements of a tensor that share a bit, 1 to 65536. With 1, only values are sent that some
            rank has; where whole rows are zeros, as of embeddings, 64 takes 64 times fewer bits.
    """

    block: int = 1

    name: ClassVar[str] = "homomorphic"
    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "the values where any rank has one, exactly, and a bitmap of these"
    source: ClassVar[str] = "after Li et al., arXiv:2402.07529"
    page: ClassVar[str] = "sparse_methods.md#homomorphic"
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"block": 64}, {"block": 7})
    counts_late: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not whole(self.block) or not 1 <= self.block <= _MOST_BLOCK:
            raise ConfigError(f"block should be in [1, {_MOST_BLOCK}], got {self.block!r}")

    def properties(self) -> Properties:
        return Properties(Law(unbiased=True, conserves=True, bound="rounding only", zeros=True))

    def layout(self, bucket: Bucket, world: int) -> Layout:
        bitmap = {"bitmap": (torch.uint8, self._blocks(bucket).padded // 8)}
        return Layout({"values": (work_dtype(bucket), bucket.count)}, preludes=(bitmap,), varies=True)

    def _blocks(self, bucket: Bucket) -> Bucket:
        """Return the same tensors with an element for each block: where their bits are."""
        sizes = [-(-tensor.count // self.block) for tensor in bucket.tensors]
        tensors = (TensorSpec(t.name, (size,), t.dtype) for t, size in zip(bucket.tensors, sizes, strict=True))
        return Bucket(bucket.index, tuple(tensors))

    def prepare(self, work: Work) -> None:
        blocks, bitmap = self._blocks(work.bucket), work.shared["bitmap"]
        work.memo |= {"blocks": blocks, "at": []}
        flags = torch.ones(blocks.padded, dtype=torch.bool)
        for position in range(len(blocks.tensors)):
            first = blocks.offsets[position]
            flags[first : first + blocks.tensors[position].count] = False
        outside = torch.zeros_like(bitmap, device="cpu").copy_(packed(flags)).view(torch.int64)
        edges = torch.tensor([*blocks.offsets, blocks.padded]) // 64
        work.memo |= {"outside": outside.to(bitmap.device), "edges": edges.to(bitmap.device)}

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        for position in positions:
            self._flag(work.grad(position), self._bits(work, position, work.shared["bitmap"]))
        return [0] * len(positions)  # counted where values are packed: one pass less, and none of a zero

    def _bits(self, work: Work, position: int, bitmap: Tensor) -> Tensor:
        """Return the bytes that hold a tensor's bits: every tensor starts a word."""
        blocks: Bucket = work.memo["blocks"]
        first = blocks.offsets[position] // 8
        return bitmap[first : first - (-blocks.tensors[position].count // 8)]

    def _flag(self, grad: Tensor, bits: Tensor) -> None:
        size = max(1, bits.numel() if grad.is_cuda else AT_A_TIME // (8 * self.block))  # a tensor may be empty
        for at in range(0, bits.numel(), size):
            some = grad[8 * self.block * at : 8 * self.block * (at + size)]
            bits[at : at + size] = packed(self._any(some != 0))

    def _any(self, flags: Tensor) -> Tensor:
        """Return whether some flag of each block is set."""
        if self.block == 1:
            return flags
        flags = torch.nn.functional.pad(flags, (0, -flags.numel() % self.block))
        if self.block % 8 == 0:
            flags = flags.view(torch.int64)  # an eighth of the numbers to go through
        return flags.view(-1, self.block // flags.element_size()).any(1)

    def before(self, number: int, work: Work, key: Key) -> dict[int, int] | None:
        if number == 0:
            for position in work.absent():
                self._bits(work, position, work.shared["bitmap"]).zero_()
            return None
        values, found = work.regions["values"], self._places(work, key)
        work.memo["at"], work.used = found, found[-1][1].stop * values.element_size() if found else 0
        if not found:
            return None
        grads = [work.grad(position) for position, _, _ in found]
        mine = [g if at is None else g.index_select(0, at) for g, (_, _, at) in zip(grads, found, strict=True)]
        counts = ops.dense_offer_all(mine, None, [values[where] for _, where, _ in found])
        numbers = counts.tolist() if isinstance(counts, Tensor) else together(counts)
        return {position: count for (position, _, _), count in zip(found, numbers, strict=True) if count}

    def _places(self, work: Work, key: Key) -> list[_Place]:
        """Return which elements of which tensors are sent, and where in the payload they are. Waits on CUDA."""
        blocks: Bucket = work.memo["blocks"]
        if not (counts := self._counts(work, key)):
            return []
        entire = {p for p, number in counts.items() if number > _NEARLY_ALL * blocks.tensors[p].count}
        bitmap = work.shared["bitmap"]
        if entire:
            bitmap = bitmap.clone()
            for position in entire:
                self._bits(work, position, bitmap).zero_()
        every, found, at, read = set_bits(bitmap), [], 0, 0
        for position, number in counts.items():
            count = work.bucket.tensors[position].count
            inside = None
            if position not in entire:
                inside = self._elements(every[read : read + number] - blocks.offsets[position], count)
                read, count = read + number, inside.numel()
            found.append((position, slice(at, at + count), inside))
            at += count
        return found

    def _counts(self, work: Work, key: Key) -> dict[int, int]:
        """Return how many bits of each tensor are 1, of those that have any."""
        words = work.shared["bitmap"].view(torch.int64)
        before = torch.nn.functional.pad(ones(words).cumsum(0), (1, 0))[work.memo["edges"]]
        outside = (words & work.memo["outside"]).count_nonzero()
        *numbers, wrong = torch.cat([before.diff(), outside.view(1)]).tolist()
        if wrong or any(numbers[position] for position in work.absent()):
            raise CorruptFrameError(
                f"rank {key.rank}: the bitmap that the ranks share has bits of no gradient that is exchanged (step "
                f"{key.step}, bucket {key.bucket}); its memory may be faulty, or ranks left out different tensors"
            )
        return {position: number for position, number in enumerate(numbers) if number}

    def _elements(self, blocks: Tensor, count: int) -> Tensor:
        """Return the elements of some blocks of a tensor; its last one may be shorter."""
        if self.block == 1:
            return blocks
        elements = (blocks[:, None] * self.block + torch.arange(self.block, device=blocks.device)).view(-1)
        return elements if count % self.block == 0 else elements[elements < count]

    def combine(self, work: Work, piece: Piece, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        if piece.region == "bitmap":
            piece.values.bitwise_or_(other)
        else:
            super().combine(work, piece, other, weights, key)

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        found, values = work.memo["at"], work.regions["values"]
        entire = {position for position, _, inside in found if inside is None}
        for part in parts:
            if part.position not in entire:
                work.grad(part.position).zero_()
        if not found:
            return
        grads = [work.grad(position) for position, _, _ in found]
        results = [g if at is None else g.new_empty(at.numel()) for g, (_, _, at) in zip(grads, found, strict=True)]
        ops.dense_decode_all([values[where] for _, where, _ in found], results, scale=result_scale / work.world)
        for grad, result, (_, _, inside) in zip(grads, results, found, strict=True):
            if inside is not None:
                grad.index_copy_(0, inside, result)
        if not values.is_cuda:  # else what is queued has yet to read them, and the next round replaces them
            work.memo["at"] = []
