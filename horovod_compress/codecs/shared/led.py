"""Values at positions that one rank chose for all of them, the leader, which is another rank in every step.

ScaleCom, Chen et al., arXiv:2104.11125, NeurIPS 2020.

    x = gradient + residual, for each tensor of d elements; k = ceil(density * d)
    T = the k largest |x| of rank (step mod M), exactly; the lower position among equals, never a zero
    prelude  = the positions of T from that rank, zeros from all others
    payload  = x at T, in order: these add
    result   = mean over ranks at T, 0 elsewhere
    residual = (1 - filter) * residual + filter * (x - (x at T, 0 elsewhere))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ... import ops
from ...ops.keys import Key
from ...schedule.plan import Bucket
from ..base import Algebra, Codec, Law, Piece, Properties
from ..work import Counts, Layout, Part, Work, per_element, slices, work_dtype
from . import positions as written
from .sections import check_count, check_well_formed, choose, chosen, nonfinite_of, numbers_at, numbers_of, share


@dataclass(frozen=True)
class Led(Codec):
    """What every round does."""

    density: float
    filter: float

    name: ClassVar[str] = "topk"
    algebra: ClassVar[Algebra] = Algebra.SUM
    batched: ClassVar[bool] = True
    summary: ClassVar[str] = "values at the positions of one rank's largest, which add"

    def properties(self) -> Properties:
        bound = "own: (1 - k/d) |x|^2 where ranks are alike"
        law = Law(conserves=self.filter == 1, bound=bound, zeros=True)
        return Properties(law, feedback="own", divides="before", share_sent=self.density)

    def layout(self, bucket: Bucket, world: int) -> Layout:
        for tensor in bucket.tensors:
            check_count(self.name, tensor)
        most = sum(self._most(bucket))
        values = (work_dtype(bucket), most)
        leaders = {"leaders": (torch.uint8, written.room(most, bucket.padded))}
        return Layout(
            {"values": values},
            preludes=(leaders,) if most else (),
            state=per_element(bucket, "residual"),
            scratch={"positions": (torch.int32, most), "own": values} | numbers_of(bucket),
        )

    def _most(self, bucket: Bucket) -> list[int]:
        return [share(self.density, tensor.count) for tensor in bucket.tensors]

    def prepare(self, work: Work) -> None:
        most = self._most(work.bucket)
        work.memo |= {"places": slices(most), "given": {}, "most": sum(most), "at": []}

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        """Choose what is sent, on the leader; and count what is not finite. On CUDA nothing waits."""
        for position in positions:
            own = work.memo["places"][position]
            number = own.stop - own.start if _leads(work, key) else min(own.stop - own.start, 1)
            room = (work.local[name][own][:number] for name in ("positions", "own"))
            work.memo["given"][position] = work.grad(position), work.residual_of(position), number, *room
        numbers = [numbers_at(work, position) for position in positions]
        choose(ops.top_select_all, [work.memo["given"][position] for position in positions], numbers)
        return nonfinite_of(numbers)

    def before(self, number: int, work: Work, key: Key) -> None:
        if number or not work.memo["most"]:
            work.memo["given"].clear()
            return
        leaders, given = work.shared["leaders"].zero_(), work.memo["given"]
        if _leads(work, key):
            present = work.present()
            numbers = [numbers_at(work, position) for position in present]
            found = chosen(ops.top_select_all, [given[position] for position in present], numbers)
            mine = [self._chosen(work, p, kept) for p, kept in zip(present, found, strict=True)]
            every = torch.cat(mine) if mine else leaders.new_zeros(0, dtype=torch.int64)
            written.write(every, work.memo["most"], work.bucket.padded, leaders)
        given.clear()

    def _chosen(self, work: Work, position: int, kept: int) -> Tensor:
        """Return the positions in the bucket that were chosen of one tensor."""
        inside = work.local["positions"][work.memo["places"][position]][:kept]
        return inside.long() + work.bucket.offsets[position]

    def combine(self, work: Work, piece: Piece, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        if piece.region == "leaders":
            piece.values.bitwise_or_(other)  # with zeros, but for one
        else:
            super().combine(work, piece, other, weights, key)

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        values = work.regions["values"]
        at = written.read(work.shared["leaders"], work.memo["most"], work.bucket.padded) if work.memo["most"] else None
        work.memo["at"] = [] if at is None else self._shared_out(work, at, key)
        if at is None and work.memo["most"]:
            check_well_formed([1], [0], "positions", work, key)
        values.zero_()
        for position, where, inside in work.memo["at"]:
            residual = work.state["residual"][work.span(position)]
            values[where] = residual[inside] + work.grad(position)[inside].to(residual.dtype)
        values.clamp_(-work.limit(), work.limit())
        work.local["own"].copy_(values)

    def _shared_out(self, work: Work, at: Tensor, key: Key) -> list[written.Places]:
        try:
            return written.places(work, at, work.present())
        except ValueError:  # of a tensor that is not here, or of none
            check_well_formed([1], [0], "positions", work, key)
            raise

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        for position in (part.position for part in parts):
            grad, residual = work.grad(position), work.state["residual"][work.span(position)]
            if self.filter != 1:  # of x - what was sent that much more than of the residual
                mine = grad.to(residual.dtype).mul_(self.filter)
                ops.absorb(mine, residual)
                grad.zero_()
            else:
                ops.absorb(grad, residual)
        values, own = work.regions["values"], work.local["own"]
        for position, where, inside in work.memo["at"]:
            grad, residual = work.grad(position), work.state["residual"][work.span(position)]
            grad[inside] = (values[where] * (result_scale / work.world)).to(grad.dtype)
            work.saturate(position, result_scale)
            residual[inside] = residual[inside] - own[where] * self.filter
            for momentum in work.momenta.get(position, ()):
                momentum[inside] = 0


def _leads(work: Work, key: Key) -> bool:
    """Return whether this rank chooses."""
    return key.step % work.world == key.rank
