"""What the codings of QSGD share, and the one in Elias codes: see :mod:`..qsgd`.

Sections of variable length are gathered. With a bound of the error it is sparse dithering, Albasyoni, Safaryan, Condat
and Richtarik, arXiv:2010.03246:

    x = gradient + residual;  code = x / N * s to the nearest level
    N = the largest that is found with |x - N / s * code|^2 <= error * |x|^2 in each block
    residual = x - N / s * code
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import ops
from ...errors import ConfigError
from ...ops.keys import Key
from ...schedule.plan import Bucket, TensorSpec
from ..base import Algebra, Codec, Divides, Law, Properties
from ..work import Counts, Layout, Part, Work, counts_of, per_element, slices, work_dtype
from .rounding import COARSE, excess, key_of
from .sections import LENGTH_BYTES, check_well_formed, cut


@dataclass(frozen=True)
class Quantised(Codec):
    """What both codings share: the blocks, and the error of one quantisation."""

    bits: int
    block: int
    norm: str | int
    correlated: bool = False

    name: ClassVar[str] = "qsgd"

    @property
    def levels(self) -> int:
        """Return s: the code of the norm."""
        return (1 << (self.bits - 1)) - 1

    def _blocks(self, tensor: TensorSpec) -> int:
        return -(-tensor.count // self.block)

    def _rule(self) -> dict[str, int]:
        return {"bits": self.bits, "block": self.block}

    def _power(self) -> int:
        return 0 if self.norm == "max" else 2

    def properties(self) -> Properties:
        first = "sum over ranks and blocks of N/s min(d N/s / 4, |x|_1) / M^2"
        bound = f"{first}, and the same for the mean" if self.algebra is Algebra.FOLD else first
        law = Law(unbiased=True, bound=bound, error=self._error, zeros=True)
        return Properties(law, divides=self._divides())

    def _divides(self) -> Divides:
        # With 8 bits the optimizer's own second moment hardly notices.
        return "before" if self.bits < COARSE else "never"

    def _error(self, x: Sequence[Tensor]) -> float:
        raise NotImplementedError

    def prepare(self, work: Work) -> None:
        work.memo["blocks"] = slices([self._blocks(tensor) for tensor in work.bucket.tensors])

    def _offset(self, work: Work, position: int) -> int:
        """Return which element of the bucket's random bits the first one of a tensor is."""
        return int(work.memo["blocks"][position].start) * self.block

    def _norm_of(self, block: Tensor) -> float:
        return float(block.abs().max() if self.norm == "max" else block.square().sum().sqrt())

    def variance(self, size: int, norm: float, magnitudes: float) -> float:
        """Return a bound of the expected squared error of one quantisation of a block.

        Args:
            size: elements of the block.
            magnitudes: the sum of ``|x|``.
        """
        return norm / self.levels * min(size * norm / (4 * self.levels), magnitudes)

    def variance_of_mean(self, blocks: Sequence[Tensor]) -> float:
        """Return a bound of the expected squared error of the mean of the ranks' quantised blocks."""
        size, world, norms = blocks[0].numel(), len(blocks), [self._norm_of(block) for block in blocks]
        magnitudes = [float(block.abs().sum()) for block in blocks]
        found = sum(self.variance(size, n, m) for n, m in zip(norms, magnitudes, strict=True)) / world**2
        step = sum(norms) / world / self.levels
        return found + (excess(size, step, sum(magnitudes), world) if self.correlated else 0.0)


@dataclass(frozen=True)
class Elias(Quantised):
    """Codes of variable length in sections, one for each tensor, which every rank decodes and adds."""

    algebra: ClassVar[Algebra] = Algebra.GATHER
    summary: ClassVar[str] = "integers on each rank's own scale in Elias codes, gathered"
    batched: ClassVar[bool] = True

    def _room(self, tensor: TensorSpec) -> int:
        return ops.elias_bound(tensor.count, **self._rule())

    def layout(self, bucket: Bucket, world: int) -> Layout:
        for tensor in bucket.tensors:
            if self._room(tensor) >= 1 << 31:
                raise ConfigError(
                    f'qsgd with coding="elias" takes sections of less than 2 GB; {tensor.name} is too large'
                )
        room = sum(LENGTH_BYTES + self._room(tensor) for tensor in bucket.tensors)
        return Layout({"payload": (torch.uint8, room)}, local={"places": (torch.int64, 2 * len(bucket.tensors))})

    def prepare(self, work: Work) -> None:
        super().prepare(work)
        rooms = slices([self._room(tensor) for tensor in work.bucket.tensors])
        work.memo["starts"] = starts = [LENGTH_BYTES * len(rooms) + room.start for room in rooms]
        work.local["places"][::2] = torch.tensor(starts, device="cpu")

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return counts_of([self._submit(work, position, key) for position in positions])

    def _submit(self, work: Work, position: int, key: Key) -> int | Tensor:
        """Write the section of a tensor where it fits at any length; ``encode`` moves them together."""
        drawn = key_of(key, work.world, self.correlated)
        return self._write(work, position, work.grad(position), drawn, offset=self._offset(work, position))

    def _write(self, work: Work, position: int, x: Tensor, key: Key | None, **more: Any) -> int | Tensor:
        place = work.local["places"][2 * position : 2 * position + 2]
        rule = self._rule() | {"norm": self._power()} | more
        return ops.elias_encode(x, place, work.regions["payload"], key, **rule)

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        payload, starts = work.regions["payload"], work.memo["starts"]
        at = table = LENGTH_BYTES * len(work.bucket.tensors)
        ends = work.local["places"][1::2].tolist()
        lengths = [0] * len(ends)  # sparse gradients, which Horovod reduces itself, have no section
        for position in (part.position for part in parts):
            if ends[position] < 0:
                raise RuntimeError(f"bucket {work.bucket.index}: a section found no room in its payload")
            lengths[position] = ends[position] - starts[position]
            _move(payload, starts[position], at, lengths[position])
            at += lengths[position]
        payload[:table].view(torch.int32).copy_(torch.tensor(lengths, dtype=torch.int32, device="cpu"))
        work.used = at

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        sections = cut(work.gathered, len(work.bucket.tensors))
        rule: dict[str, Any] = self._rule() | {"scale": result_scale / (work.world * self.levels)}
        positions = [part.position for part in parts]
        wrong = [ops.elias_decode([of_rank[p] for of_rank in sections], work.grad(p), **rule) for p in positions]
        check_well_formed(wrong, positions, "Elias codes", work, key)

    def _error(self, x: Sequence[Tensor]) -> float:
        blocks = zip(*(one.split(self.block) for one in x), strict=True)
        return sum(map(self.variance_of_mean, blocks), 0.0)


@dataclass(frozen=True)
class Bounded(Elias):
    """Levels as far apart as a bound of each block's error allows, to the nearest; the residual keeps what is lost."""

    error: float = field(kw_only=True)

    summary: ClassVar[str] = "integers on the widest scale that keeps an error in bounds, in Elias codes, gathered"
    exact_first: ClassVar[bool] = True

    def properties(self) -> Properties:
        law = Law(conserves=True, bound="own: error |x|^2", error=self._error, zeros=True)
        return Properties(law, feedback="own", divides="before")

    def layout(self, bucket: Bucket, world: int) -> Layout:
        x = {"x": (work_dtype(bucket), bucket.padded)}
        return replace(super().layout(bucket, world), state=per_element(bucket, "residual"), scratch=x)

    def _submit(self, work: Work, position: int, key: Key) -> int | Tensor:
        x = torch.add(self._residual(work, position), work.grad(position), out=work.local["x"][work.span(position)])
        largest = torch.finfo(torch.float32).max
        if work.bucket.dtype == "float64":  # what such a value leaves would wait for ever
            x.masked_fill_(x.abs() > largest, math.nan)
        limit = min(work.limit(), largest / (2 * work.world)) / 2  # rounded up, a value at most doubles
        x.nan_to_num_(math.nan, math.nan, math.nan).clamp_(-limit, limit)  # the residual keeps the rest
        return self._write(work, position, x, None, error=self.error)

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        positions = [part.position for part in parts]
        for position in positions:
            self._residual(work, position).add_(work.grad(position))
        super().decode(work, parts, key, result_scale)
        (own,) = cut([work.gathered[key.rank]], len(work.bucket.tensors))
        for position in positions:
            sent = work.local["x"][work.span(position)]
            ops.elias_decode([own[position]], sent, **self._rule(), scale=1 / self.levels)
            self._residual(work, position).sub_(sent)
            work.saturate(position, result_scale)

    def _residual(self, work: Work, position: int) -> Tensor:
        residual = work.residual_of(position)
        assert residual is not None
        return residual

    def _error(self, x: Sequence[Tensor]) -> float:
        return sum(self.error * float(one.square().sum()) for one in x) / len(x)


def _move(payload: Tensor, start: int, at: int, nbytes: int) -> None:
    """Move bytes of a payload to where they may overlap."""
    if payload.is_cpu:
        memory = payload.numpy()
        memory[at : at + nbytes] = memory[start : start + nbytes]  # NumPy moves what overlaps
    elif at != start:
        payload[at : at + nbytes] = payload[start : start + nbytes].clone()
