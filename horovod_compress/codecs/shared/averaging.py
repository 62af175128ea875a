"""Methods that keep a fading average of what they round off, in a few bits for each element (LoCo, arXiv:2407.04480).

The rule is in :mod:`.rounding`. Errors are records of QSGD with the largest magnitude of a block as its norm: at 8 bits
a byte for each element, and 4 for a block. What a round leaves goes to memory beside them, and takes their place when
the result is decoded: so a bucket that is not finite leaves them as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...ops.keys import Key
from ...ops.sizes import NORM_BYTES
from ...schedule.plan import Bucket
from ..base import Codec, Divides, Law, Properties, TableMoves
from ..work import Layout, Part, Work, slices, work_dtype
from .dithering import BLOCK_UNIT, Uniform
from .rounding import COARSE, Average


class Remembering(Codec):
    """Where errors lie, and how they follow their tensors to other buckets."""

    average: Average  # the field of the methods

    @property
    def errors_block(self) -> int:
        """How many errors share a norm."""
        raise NotImplementedError

    @property
    def errors_size(self) -> int:
        """The bytes of a block of errors."""
        return ops.qsgd_record_bytes(self.average.bits, self.errors_block)

    def remembering(self, divides: Divides) -> Properties:
        """Return what is true of such a method."""
        return Properties(
            Law(bound="what waits of an element is at most half of its largest level so far", zeros=True),
            divides=divides,
            has_private_state=True,
            moves_tables=TableMoves(self._views, scale=self._scale_tables, spoilt=self._count_spoilt),
            stands_for_mean=True,
        )

    def remembered_in(self, usual: Layout, bucket: Bucket) -> Layout:
        """Return a layout with memory for errors, and for what a round leaves."""
        memory = torch.uint8, sum(self._sizes(bucket))
        return replace(usual, tables={"errors": memory}, local=usual.local | {"left": memory})

    def _sizes(self, bucket: Bucket) -> list[int]:
        return [-(-tensor.count // self.errors_block) * self.errors_size for tensor in bucket.tensors]

    def prepare(self, work: Work) -> None:
        super().prepare(work)
        work.memo["errors"] = slices(self._sizes(work.bucket))

    def of_part(self, work: Work, part: Part) -> slice:
        """Return where the errors of a part lie."""
        first, size, block = work.memo["errors"][part.position].start, self.errors_size, self.errors_block
        return slice(first + part.start // block * size, first - (-part.stop // block) * size)

    def keep(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        """Let what a round left of parts take the place of what was kept."""
        errors, left = work.tables["errors"], work.local["left"]
        for place in (self.of_part(work, part) for part in parts):
            errors[place] = left[place]
        for position in work.absent() if self.average.forgets(key) else ():
            errors[work.memo["errors"][position]] = 0

    def _scale_tables(self, work: Work, factor: float) -> None:
        """Let errors have another unit: of a record, the norm is multiplied, which stays finite."""
        for kept in (work.tables["errors"], *(carry.kept for carry in work.carry.values())):
            norms = self._norms(kept)
            scaled = norms.contiguous().view(torch.float32) * factor
            norms.copy_(scaled.clamp_(max=torch.finfo(torch.float32).max).view(torch.uint8))

    def _norms(self, kept: Tensor) -> Tensor:
        """Return the bytes of the norms of records."""
        whole = kept.numel() // self.errors_size * self.errors_size
        return kept.view(-1)[:whole].view(-1, self.errors_size)[:, :NORM_BYTES]

    def _count_spoilt(self, kept: Tensor, most: float) -> int:
        norms = self._norms(kept.contiguous()).contiguous().view(torch.float32)
        return int((~((norms >= 0) & (norms < most))).sum())

    # ---- other buckets ----

    def _views(self, work: Work, position: int) -> dict[str, Tensor]:
        return {"errors": work.tables["errors"][work.memo["errors"][position]]}


class AveragedUniform(Remembering, Uniform):
    """Codes to the nearest level of gradients and errors, on scales of all ranks: their sums are exact."""

    @property
    def errors_block(self) -> int:
        return BLOCK_UNIT  # parts are multiples of it

    def properties(self) -> Properties:
        return self.remembering("before" if self.bits < COARSE else "never")

    def layout(self, bucket: Bucket, world: int) -> Layout:
        values = {name: (work_dtype(bucket), bucket.padded) for name in ("x", "other")}
        return replace(self.remembered_in(super().layout(bucket, world), bucket), scratch=values)

    def _values(self, work: Work, positions: Sequence[int], key: Key) -> list[Tensor]:
        """Return gradients with the errors that were kept."""
        parts = [Part(position, 0, work.bucket.tensors[position].count) for position in positions]
        found = [work.local["x"][work.place(part)] for part in parts]
        self._decode_errors(work, parts, found, key)
        for x, position in zip(found, positions, strict=True):
            x.add_(work.grad(position))
        return found

    def _decode_errors(self, work: Work, parts: Sequence[Part], into: list[Tensor], key: Key) -> None:
        if self.average.forgets(key):
            for x in into:
                x.zero_()
            return
        top = (1 << self.average.bits - 1) - 1
        records = [work.tables["errors"][self.of_part(work, part)] for part in parts]
        ops.qsgd_decode_all(records, into, bits=self.average.bits, block=self.errors_block, scale=1 / top)

    def _encode(self, work: Work, parts: Sequence[Part], *given: Any, offsets: list[int]) -> None:
        _, scales, rows, codes, key = given
        x, other = ([work.local[name][work.place(part)] for part in parts] for name in ("x", "other"))
        levels, bits = self.levels(work.world), self.bits
        ops.uniform_encode_all(x, scales, rows, codes, None, bits=bits, levels=levels)
        ops.uniform_decode_all(codes, scales, rows, other, bits=bits, scale=1 / levels)
        for values, sent in zip(x, other, strict=True):
            values.sub_(sent).mul_(1 - self.average.beta)
        self._decode_errors(work, parts, other, key)
        for values, errors in zip(x, other, strict=True):
            values.add_(errors.mul_(self.average.beta))
        left = [work.local["left"][self.of_part(work, part)] for part in parts]
        ops.qsgd_encode_all(x, left, None, bits=self.average.bits, block=self.errors_block, norm=0)

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        super().decode(work, parts, key, result_scale)
        self.keep(work, parts, key)
