"""Codes of a few bits for each element, on scales that a prelude finds: what the methods that round so share.

A *row* is the elements of a tensor that share a scale: blocks of it, or all of it. The scales are the
norms of rows over all ranks, or the norm of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ... import ops
from ...ops.keys import DITHER, Key
from ...schedule.plan import Bucket, TensorSpec
from ..base import Codec
from ..work import Part, Regions, Work, work_dtype

#: Blocks are whole chunks of the kernels; a scale of 32 bits then costs 1/8 bit per element at most.
BLOCK_UNIT = 256

#: Of parts of tensors the codes or the gradients, the scales, and how many elements share one.
Scaled = tuple[list[Tensor], list[Tensor], list[int]]


def whole(value: Any) -> bool:
    """Return whether an option is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)


class Dithering(Codec):
    """The norms, and where codes lie; how numbers become codes is the method's own business."""

    bits: int  # the fields of the methods

    # ---- layout ----

    def _powers(self) -> tuple[int, int]:
        """Return which power of ``|x|`` a rank's norm adds up, and which of the ranks' norms; 0 for the maximum."""
        return 0, 0

    def _block(self) -> int:
        """Return how many elements make a row; 0 for all of a tensor."""
        return 0

    def _one_scale(self) -> bool:
        """Return whether all rows of a bucket have one scale."""
        return not self._block()

    def _rows(self, tensor: TensorSpec) -> int:
        block = self._block()
        return -(-tensor.count // block) if block else 1

    def _row(self, tensor: TensorSpec) -> int:
        return self._block() or max(1, tensor.count)

    def _parts(self, bucket: Bucket) -> int:
        return sum(self._rows(tensor) for tensor in bucket.tensors)

    def _norms(self, bucket: Bucket) -> tuple[torch.dtype, int]:
        dtype = torch.float64 if any(self._powers()) else work_dtype(bucket)
        return dtype, 1 if self._one_scale() else self._parts(bucket)

    def regions(self, bucket: Bucket) -> Regions:
        return {"codes": ops.code_layout(self.bits, bucket.padded)}

    def preludes(self, bucket: Bucket) -> tuple[Regions, ...]:
        return ({"norms": self._norms(bucket)},)

    def local(self, bucket: Bucket) -> Regions:
        work, count = work_dtype(bucket), self._norms(bucket)[1]
        return {"parts": (torch.float64 if self._powers()[0] else work, self._parts(bucket)), "scales": (work, count)}

    def prepare(self, work: Work) -> None:
        parts, start = [], 0
        for tensor in work.bucket.tensors:
            parts.append(slice(start, start + self._rows(tensor)))
            start = parts[-1].stop
        work.memo["parts"] = parts

    def _first_scale(self, work: Work, position: int) -> int:
        """Return where the scales of one tensor begin: the bucket's only one, or one for each of its rows."""
        return 0 if self._one_scale() else int(work.memo["parts"][position].start)

    def _places(self, work: Work, position: int, start: int, stop: int, bits: int) -> slice:
        """Return where the codes of elements ``start`` to ``stop`` of a tensor lie.

        Tensors and their parts start at whole bytes.
        """
        first = work.span(position).start
        return slice(*(ops.code_layout(bits, first + element)[1] for element in (start, stop)))

    # ---- norms ----

    def offer(self, work: Work, position: int, key: Key) -> int | Tensor:
        row, parts = self._row(work.bucket.tensors[position]), self._rows_of("parts", work, position)
        nonfinite = ops.norm_offer(work.grad(position), parts, row, power=self._powers()[0])
        if not self._may_overflow(work):
            return nonfinite
        return int(nonfinite) or int(not bool(_of_rank(parts.clone(), *self._powers()).isfinite().all()))

    def offer_all(self, work: Work, positions: Sequence[int], key: Key) -> Tensor:
        if self._may_overflow(work):
            return super().offer_all(work, positions, key)
        return ops.norm_offer_all(
            [work.grad(position) for position in positions],
            [self._rows_of("parts", work, position) for position in positions],
            [self._row(work.bucket.tensors[position]) for position in positions],
            power=self._powers()[0],
        )

    def _may_overflow(self, work: Work) -> bool:
        """Return whether there are numbers whose powers float64 cannot hold.

        They would make every element of a block NaN, and nobody would count it.
        """
        return any(self._powers()) and work_dtype(work.bucket) is torch.float64

    def _rows_of(self, name: str, work: Work, position: int) -> Tensor:
        """Return what a local array holds for the rows of one tensor: nothing, if it is empty."""
        tensor, first = work.bucket.tensors[position], work.memo["parts"][position].start
        return work.local[name][first : first - (-tensor.count // self._row(tensor))]

    def begin(self, number: int, work: Work, key: Key) -> None:
        parts, norms = work.local["parts"], work.shared["norms"]
        for position, own in enumerate(work.memo["parts"]):
            if work.grads[position] is None:
                parts[own] = 0  # what an earlier step left
        if self._one_scale():
            norms[0] = _added(parts) if self._powers()[0] else parts.max()
        else:
            norms.copy_(parts)
        _of_rank(norms, *self._powers())

    def merge(self, region: str, start: int, into: Tensor, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        if region != "norms":
            self._merge_codes(start, into, other, key)
        elif self._powers()[1]:
            ops.dense_add(into, other)
        else:
            torch.maximum(into, other, out=into)

    def _merge_codes(self, start: int, into: Tensor, other: Tensor, key: Key) -> None:
        raise NotImplementedError

    # ---- codes ----

    encodes_in_parts: ClassVar[bool] = True

    def encode_first(self, work: Work, key: Key) -> None:
        self._make_scales(work)

    def encode_part(self, work: Work, position: int, start: int, stop: int, key: Key) -> None:
        # Of this class: a subclass whose form for one part ends here may have the one for several call that.
        Dithering.encode_parts(self, work, [Part(position, start, stop)], key)

    def encode_parts(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        grads, scales, rows = self._scaled(work, parts)
        offsets = [work.span(part.position).start + part.start for part in parts]
        positions, given = [part.position for part in parts], (grads, scales, rows)
        codes = self._codes(work, parts, work.regions["codes"], self.bits)
        self._encode(work, positions, given, codes, key.at(purpose=DITHER), offsets)

    def _make_scales(self, work: Work) -> None:
        norms = work.shared["norms"]
        _take_roots(norms, self._powers()[1])
        scales = work.local["scales"].copy_(norms)
        if norms.dtype is torch.float64 and scales.dtype is torch.float32:
            scales.clamp_(max=torch.finfo(torch.float32).max)  # no element is larger

    def _scaled(self, work: Work, parts: Sequence[Part]) -> Scaled:
        """Return parts of the gradients, and their scales."""
        rows = [self._row(work.bucket.tensors[part.position]) for part in parts]
        grads = [work.grad(part.position)[part.start : part.stop] for part in parts]
        every = work.local["scales"]
        firsts = [self._first_scale(work, part.position) for part in parts]
        own = zip(parts, firsts, rows, strict=True)
        return grads, [every[at + part.start // row : at - (-part.stop // row)] for part, at, row in own], rows

    def _codes(self, work: Work, parts: Sequence[Part], codes: Tensor, bits: int) -> list[Tensor]:
        return [codes[self._places(work, part.position, part.start, part.stop, bits)] for part in parts]

    def _encode(
        self, work: Work, positions: Sequence[int], given: Scaled, codes: list[Tensor], key: Key, offsets: list[int]
    ) -> None:
        """Write the codes of parts of tensors.

        Args:
            offsets: where the parts lie in the bucket, for random bits.
        """
        raise NotImplementedError

    def granule(self, tensor: TensorSpec) -> int:
        return self._block() if 0 < self._block() < tensor.count else BLOCK_UNIT

    def needs(self, work: Work, position: int, start: int, stop: int) -> dict[str, tuple[int, int]]:
        codes = self._places(work, position, start, stop, self.bits)
        return {"codes": (codes.start, codes.stop)}  # scales are known since the prelude

    def decode_part(self, work: Work, position: int, start: int, stop: int, key: Key, gain: float) -> None:
        Dithering.decode_parts(self, work, [Part(position, start, stop)], key, gain)  # as in encode_part

    def decode_parts(self, work: Work, parts: Sequence[Part], key: Key, gain: float) -> None:
        grads, scales, rows = self._scaled(work, parts)
        codes = self._codes(work, parts, work.regions["codes"], self.bits)
        self._decode((codes, scales, rows), grads, work.world, gain)

    def _decode(self, given: Scaled, grads: list[Tensor], world: int, gain: float) -> None:
        raise NotImplementedError


def _of_rank(norms: Tensor, power: int, across: int) -> Tensor:
    """Turn, in place, sums of powers of ``|x|`` into what is added or compared over the ranks."""
    if power != across:
        _take_roots(norms, power)
        for _ in range(across.bit_length() - 1):
            norms.mul_(norms)
    return norms


def _take_roots(sums: Tensor, power: int) -> None:
    """Take roots by square roots: NumPy's are right to the last bit on every machine, torch's are not."""
    if power > 1:
        roots = sums.cpu()  # the same memory, if it is on the CPU
        for _ in range(power.bit_length() - 1):
            np.sqrt(roots.numpy(), out=roots.numpy())
        sums.copy_(roots)


def _added(parts: Tensor) -> float:
    """Add one by one: the order of torch's own sum depends on the machine."""
    total = 0.0
    for part in parts.tolist():
        total += part
    return total
