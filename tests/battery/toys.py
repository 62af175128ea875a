"""Two small methods in plain torch.

They use the parts of the interface that few methods use, so that the battery is known to work for these too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from horovod_compress.codecs.base import Algebra, Codec, Law, Piece, Properties
from horovod_compress.codecs.work import Counts, Layout, Part, Work, per_element, work_dtype
from horovod_compress.ops.keys import Key
from horovod_compress.schedule.plan import Bucket

#: An index and a value, 8 bytes each.
ENTRY = 16


@dataclass(frozen=True)
class TopOne(Codec):
    """Gathered payloads of different lengths: the largest value of each tensor that is not all zero."""

    every: int = 1

    name: ClassVar[str] = "toy_top_one"
    algebra: ClassVar[Algebra] = Algebra.GATHER
    summary: ClassVar[str] = "the largest value of each tensor"
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"every": 2})

    def properties(self) -> Properties:
        return Properties(Law(conserves=True), feedback="own")

    def layout(self, bucket: Bucket, world: int) -> Layout:
        payload = {"payload": (torch.uint8, ENTRY * len(bucket.tensors))}
        return Layout(payload, state=per_element(bucket, "residual"))

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [int((~work.grad(position).isfinite()).sum()) for position in positions]

    def _x(self, work: Work, position: int) -> Tensor:
        residual = work.residual_of(position)
        assert residual is not None
        return work.grad(position).to(work_dtype(work.bucket)) + residual

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        work.used = 0
        for position in (part.position for part in parts):
            x = self._x(work, position)
            if not x.any() or (key.step + position) % self.every:
                continue
            own = int(x.abs().argmax())
            entry = work.regions["payload"][work.used : work.used + ENTRY]
            entry[:8].view(torch.int64)[0] = work.span(position).start + own
            entry[8:].view(torch.float64)[0] = x[own]
            work.used += ENTRY

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        total = torch.zeros(work.bucket.padded, dtype=torch.float64, device=work.regions["payload"].device)
        for payload in work.gathered:
            for at in range(0, payload.numel(), ENTRY):
                entry = payload[at : at + ENTRY].clone()  # a payload lies in a frame at any address
                total[entry[:8].view(torch.int64)] += entry[8:].view(torch.float64)
        own = work.gathered[key.rank].clone().view(-1, ENTRY)[:, :8].contiguous().view(torch.int64).view(-1)
        for position in (part.position for part in parts):
            x, span = self._x(work, position), work.span(position)
            sent = own[(own >= span.start) & (own < span.stop)] - span.start
            x[sent] = 0
            work.state["residual"][span] = x
            work.grad(position).copy_(total[span] * (result_scale / work.world))


@dataclass(frozen=True)
class Steps(Codec):
    """A prelude, two kinds of state and a table: momentum rounded to steps of one size for all ranks."""

    remember: bool = True

    name: ClassVar[str] = "toy_steps"
    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "momentum in steps"
    samples: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"remember": False})

    def properties(self) -> Properties:
        return Properties(feedback="own")

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return Layout(
            {"steps": (torch.int32, bucket.padded)},
            preludes=({"most": (torch.float64, 1)},),
            state=per_element(bucket, "residual", "momentum"),
            tables={"largest": (torch.float64, 2)} if self.remember else {},
        )

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [int((~work.grad(position).isfinite()).sum()) for position in positions]

    def _x(self, work: Work, position: int) -> tuple[Tensor, Tensor]:
        """Return (the new momentum, the same and the residual)."""
        span, grad = work.span(position), work.grad(position).to(work_dtype(work.bucket))
        momentum = work.state["momentum"][span] / 2 + grad
        return momentum, momentum + work.state["residual"][span]

    def before(self, number: int, work: Work, key: Key) -> None:
        if number == 1:  # the payload
            return
        most = [float(x.abs().max()) for x in (self._x(work, p)[1] for p in work.present()) if x.numel()]
        work.shared["most"][0] = max(most, default=0.0)

    def combine(self, work: Work, piece: Piece, other: Tensor, weights: tuple[int, int], key: Key) -> None:
        if piece.region == "most":
            torch.maximum(piece.values, other, out=piece.values)
        else:
            piece.values.add_(other)

    def _unit(self, work: Work) -> float:
        most = float(work.shared["most"])
        if "largest" in work.tables:
            most = max(most, float(work.tables["largest"][0]) / 2)
        return most / 100

    def _rounded(self, x: Tensor, unit: float) -> Tensor:
        # A number that divides is a factor on a GPU, its rounded reciprocal; a tensor divides everywhere.
        by = torch.full((), unit or 1.0, dtype=torch.float64, device=x.device)
        return (x.double() / by).round().nan_to_num().to(torch.int32)

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        for position in (part.position for part in parts):
            work.regions["steps"][work.span(position)] = self._rounded(self._x(work, position)[1], self._unit(work))

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        unit = self._unit(work)
        for position in (part.position for part in parts):
            (momentum, x), span = self._x(work, position), work.span(position)
            work.state["residual"][span] = x - (self._rounded(x, unit) * unit).to(x.dtype)
            work.state["momentum"][span] = momentum
            work.grad(position).copy_(work.regions["steps"][span] * (unit * result_scale / work.world))
        if "largest" in work.tables:
            table = work.tables["largest"]
            table[0] = max(float(work.shared["most"]), float(table[0]) / 2)
            table[1] += 1


TOYS: tuple[type[Codec], ...] = (TopOne, Steps)
