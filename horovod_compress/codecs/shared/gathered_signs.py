"""Signs with the values they stand for, gathered from all ranks: what methods with error feedback share.

A payload holds the bits of the bucket, then the values of all step groups: one or two arrays of float32.
Its length depends on the bucket alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ... import ops
from ...errors import CorruptFrameError
from ...ops.keys import Key
from ...schedule.plan import Bucket
from ..base import Algebra, Codec, Properties
from ..law import Law
from ..layout import Layout, per_element
from ..work import Part, Regions, Work
from .options import check_choice
from .signs import WORD, check_step_scale, group_count, group_length, group_slices, more_where_left_out, words

_WORD_BYTES, _VALUE_BYTES = 8, 4
_LARGEST = torch.finfo(torch.float32).max


class GatheredSigns(Codec):
    """Every rank decodes the payloads of all, and keeps what its own did not say."""

    step_size: str
    step_scale: float
    algebra: ClassVar[Algebra] = Algebra.GATHER
    wire_version: ClassVar[int] = 2
    #: How many values a step group has: one, of which the bit 0 means the negative, or two.
    values: ClassVar[int]
    #: How much of |x|^2 a payload whose values are means takes away, as a formula.
    taken: ClassVar[str]

    def __post_init__(self) -> None:
        check_choice("step_size", self.step_size, "tensor", "row")
        check_step_scale(self.step_scale)

    def properties(self) -> Properties:
        factor = "" if self.step_scale == 1 else f"{self.step_scale * (2 - self.step_scale):g} "
        law = Law(conserves=True, bound=f"own: |x|^2 - {factor}{self.taken}")
        return Properties(law, feedback="own", divides="before", batched=True)

    # ---- layout ----

    def _by_row(self) -> bool:
        return self.step_size == "row"

    def _groups(self, bucket: Bucket) -> int:
        return sum(group_count(tensor, self._by_row()) for tensor in bucket.tensors)

    def _nbytes(self, bucket: Bucket) -> int:
        return bucket.padded // WORD * _WORD_BYTES + self.values * self._groups(bucket) * _VALUE_BYTES

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return Layout(
            {"payload": (torch.uint8, self._nbytes(bucket))},
            state=per_element(bucket, "residual"),
            local=self._local(self._groups(bucket)),
            zero_groups=[group_length(tensor, self._by_row()) for tensor in bucket.tensors],
        )

    def _local(self, groups: int) -> Regions:
        """Return what is measured of every group, where that is not written into the payload."""
        return {}

    def prepare(self, work: Work) -> None:
        work.memo["groups"] = group_slices(work.bucket, self._by_row())
        work.memo["number"] = self._groups(work.bucket)
        work.memo["lengths"] = [group_length(tensor, self._by_row()) for tensor in work.bucket.tensors]
        own = work.regions["payload"]
        work.memo["bits"] = self._bits(work, own)
        work.memo["values"] = [self._values(work, own, number) for number in range(self.values)]

    def _bits(self, work: Work, payload: Tensor) -> Tensor:
        """Return the bits in a payload."""
        return payload[: work.bucket.padded // WORD * _WORD_BYTES].view(torch.int64)

    def _values(self, work: Work, payload: Tensor, number: int) -> Tensor:
        """Return one of the arrays of values in a payload."""
        size = work.memo["number"] * _VALUE_BYTES
        start = work.bucket.padded // WORD * _WORD_BYTES + number * size
        return payload[start : start + size].view(torch.float32)

    # ---- one round ----

    def before(self, number: int, work: Work, key: Key) -> None:
        absent = set(range(len(work.grads))) - set(work.present())
        for values in work.memo["values"]:
            for position in absent:
                values[work.memo["groups"][position]] = 0  # nothing was submitted: no old one is sent
            for position in work.withheld if self.values == 1 else ():
                mine = values[work.memo["groups"][position]]
                mine.mul_(more_where_left_out(work, position, work.memo["lengths"][position], mine.numel()))
            if self.step_scale != 1 or work.withheld:
                values.mul_(self.step_scale).clamp_(-_LARGEST, _LARGEST)

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        work.used = work.regions["payload"].numel()

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        nbytes = self._nbytes(work.bucket)
        for rank, payload in enumerate(work.gathered):
            if payload.numel() != nbytes:
                raise CorruptFrameError(
                    f"rank {key.rank}: the payload of rank {rank} should have {nbytes} bytes, got {payload.numel()} "
                    f"(step {key.step}, bucket {key.bucket}); check that every rank runs the same version of "
                    f"horovod-compress"
                )
        arrays = [[self._values(work, payload, n) for payload in work.gathered] for n in range(self.values)]
        present = [part.position for part in parts]
        highs, *lows = arrays
        ops.two_value_decode_all(
            [self._bits(work, payload) for payload in work.gathered],
            highs,
            lows[0] if lows else None,
            [work.memo["lengths"][position] for position in present],
            key.rank,
            [work.grad(position) for position in present],
            [work.state["residual"][work.span(position)] for position in present],
            first_words=[work.span(position).start // WORD for position in present],
            first_rows=[work.memo["groups"][position].start for position in present],
            scale=result_scale / work.world,
        )

    def _submitted(self, work: Work, positions: Sequence[int]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return gradients, residuals and bits of some tensors."""
        spans = [work.span(position) for position in positions]
        bits, residual = work.memo["bits"], work.state["residual"]
        grads = [work.grad(position) for position in positions]
        return grads, [residual[span] for span in spans], [bits[words(span)] for span in spans]
