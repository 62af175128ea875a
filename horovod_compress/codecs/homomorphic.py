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
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError, CorruptFrameError
from ..ops.keys import Key
from ..schedule.plan import Bucket, TensorSpec
from .base import Algebra, Codec, Law, Piece, Properties, whole
from .registry import register
from .work import Counts, Layout, Part, Work, work_dtype

#: Blocks may be as long as this; longer ones save no more bytes.
_MOST_BLOCK = 1 << 16
#: Tensors of whose bits more are 1 are sent whole, so that nobody looks for the elements; it takes few more bytes.
_NEARLY_ALL = 7 / 8

#: Of a tensor: its bits, None if all of it is sent; how many elements that is; and where in the payload they are.
_Sent = tuple[Tensor | None, int, Tensor]


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
    batched: ClassVar[bool] = True

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
        blocks, words = self._blocks(work.bucket), work.shared["bitmap"].view(torch.int64)
        firsts = [offset // 64 for offset in (*blocks.offsets, blocks.padded)]
        work.memo |= {"bits": [words[first:end] for first, end in pairwise(firsts)], "sent": []}

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        bits = [work.memo["bits"][position] for position in positions]
        return ops.union_mark_all(work.grads_at(positions), bits, block=self.block)

    def before(self, number: int, work: Work, key: Key) -> None:
        bits = work.memo["bits"]
        if number == 0:
            for position in work.absent():
                bits[position].zero_()
            return
        sent: list[_Sent] = []
        values, at = work.regions["values"], 0
        for tensor, mine, kept in zip(work.bucket.tensors, bits, self._counts(work, key), strict=True):
            entire = -(-kept // self.block) > _NEARLY_ALL * -(-tensor.count // self.block)
            count = tensor.count if entire else kept
            sent.append((None if entire else mine, count, values[at : at + count]))
            at += count
        work.memo["sent"], work.used = sent, at * values.element_size()
        present = work.present()
        ops.union_encode_all(work.grads_at(present), *self._sent(work, present), block=self.block)

    def _sent(self, work: Work, positions: Sequence[int]) -> tuple[list[Tensor | None], list[int], list[Tensor]]:
        sent: list[_Sent] = [work.memo["sent"][position] for position in positions]
        return [bits for bits, _, _ in sent], [kept for _, kept, _ in sent], [values for _, _, values in sent]

    def _counts(self, work: Work, key: Key) -> list[int]:
        """Return how many elements of each tensor are in the union. Waits on CUDA."""
        counts = [tensor.count for tensor in work.bucket.tensors]
        found = ops.union_count_all(work.memo["bits"], counts, block=self.block)
        numbers: list[int] = found.tolist() if isinstance(found, Tensor) else found
        if min(numbers) < 0 or any(numbers[position] for position in work.absent()):
            raise CorruptFrameError(
                f"rank {key.rank}: the bitmap that the ranks share has bits of no gradient that is exchanged (step "
                f"{key.step}, bucket {key.bucket}); its memory may be faulty, or ranks left out different tensors"
            )
        return numbers

    def combine(self, work: Work, piece: Piece, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        if piece.region == "bitmap":
            piece.values.bitwise_or_(other)
        else:
            super().combine(work, piece, other, weights, key)

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        positions = [part.position for part in parts]
        (bits, kept, values), grads = self._sent(work, positions), work.grads_at(positions)
        ops.union_decode_all(values, bits, kept, grads, block=self.block, scale=result_scale / work.world)
