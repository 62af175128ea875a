"""Sketch-Fusion: gradients are added as count sketches, which also say where the large values are.

JPDC 185, 2024, 104811; the rule after Sketched-SGD, Ivkin et al., NeurIPS 2019, and FetchSGD, Rothchild et al., ICML
2020.

    u = momentum * u + gradient;  v = v + u         on each rank
    S = sum over ranks of sketch(v)                 the same table everywhere
    I = the candidates * k positions whose values read from S are largest
    z = sum over ranks of v[I]                      exact values, a second small exchange
    T = the k largest |z|;  result = z[T] / M, 0 elsewhere
    v[T] = u[T] = 0                                 error feedback and momentum masking

With ``error_feedback="sketch"`` nothing dense is kept and there is no second exchange:

    S = mean over ranks of sketch(gradient);  U = momentum * U + S;  E = E + U
    T = the k positions whose values read from E are largest;  result = these values
    cells that T touches become 0 in E and U        subtracting them instead diverges

Other buckets hash otherwise. Their tables get the k largest values that are read from each table before.

Everything after the sums is computed from the same bytes on every rank, so all choose the same T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .. import ops
from ..errors import ConfigError
from ..ops.keys import SKETCH, Key
from ..schedule.plan import Bucket
from .base import Algebra, ByForm, Codec, Held, Law, Properties, TableMoves, check_choice
from .dense import Momentum
from .registry import register
from .shared.positions import places
from .work import Counts, Layout, Part, Regions, Work, clamped_all, dtype_of, per_element, together, work_dtype


@dataclass(frozen=True)
class _Sketching(Codec):
    """What both kinds of error feedback share."""

    density: float
    cells: float
    rows: int
    candidates: int
    momentum: float

    name: ClassVar[str] = "sketch_fusion"
    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "sums of count sketches"
    counts_late: ClassVar[bool] = True

    def properties(self) -> Properties:
        plain = Momentum(float(self.momentum)) if self.momentum else None
        return Properties(share_sent=self.density, small_tensors=plain)

    def most(self, bucket: Bucket) -> int:
        """Return k: how many elements of a bucket the result holds at most."""
        exact = Fraction(repr(self.density))
        return -(-bucket.count * exact.numerator // exact.denominator)

    def _table(self, bucket: Bucket) -> tuple[torch.dtype, int]:
        columns = ops.sketch_columns(int(bucket.count * self.cells / self.rows))
        return work_dtype(bucket), self.rows * columns

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [0] * len(positions)  # counted when the sketch is made: one pass less

    def _sketch(self, work: Work, table: Tensor, key: Key, *, state: bool) -> dict[int, int]:
        """Sketch the bucket; tensors go in order, so that every cell is summed in one order."""
        table.zero_()
        counts: dict[int, int | Tensor] = {}
        for position in work.present():
            residual = work.residual_of(position) if state else None
            momentum = work.state_of("momentum", position) if state else None
            counts[position] = ops.sketch_encode(
                work.grad(position),
                residual,
                table,
                self.rows,
                key,
                offset=work.bucket.offsets[position],
                momentum=momentum,
                factor=0.0 if momentum is None else self.momentum,
            )
        found = zip(counts, together(list(counts.values())), strict=True)
        return {position: count for position, count in found if count}

    def _largest(self, work: Work, table: Tensor, key: Key, k: int, among: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return where the values read from a table for some tensors are largest, in order, and these values."""
        positions, estimates = work.local["positions"], work.local["estimates"]
        spans = [(work.bucket.offsets[p], work.bucket.tensors[p].count) for p in among]
        spans = [span for span in spans if span[1]]
        found = ops.sketch_top(table, self.rows, key, spans, min(k, positions.numel()), positions, estimates)
        return positions[:found], estimates[:found]

    def _local(self, bucket: Bucket) -> Regions:
        if bucket.padded >= 1 << 31:
            raise ConfigError(
                f"sketch_fusion takes buckets of fewer than 2^31 elements, bucket {bucket.index} has {bucket.padded}; "
                'choose schedule="size:25MB"'
            )
        most = min(bucket.count, self.most(bucket) * self.candidates)
        return {"positions": (torch.int64, most), "estimates": (work_dtype(bucket), most)}


@dataclass(frozen=True)
class FullState(_Sketching):
    """Residual and momentum of every element are kept; values are exchanged exactly."""

    exact_first: ClassVar[bool] = True

    def properties(self) -> Properties:
        law = Law(
            conserves=not self.momentum, bound="own: (1 - k/d) |x|^2 where the sketch finds the largest", zeros=True
        )
        return replace(super().properties(), law=law, feedback="own", divides="before")

    def layout(self, bucket: Bucket, world: int) -> Layout:
        local, most, dtype = self._local(bucket), self.most(bucket), work_dtype(bucket)
        return Layout(
            {"values": local["estimates"]},
            preludes=({"table": self._table(bucket)},),
            state=per_element(bucket, *(["residual", "momentum"] if self.momentum else ["residual"])),
            local=local | {"chosen": (torch.int32, most), "kept": (dtype, most)},
        )

    def before(self, number: int, work: Work, key: Key) -> dict[int, int] | None:
        return self._sketch(work, work.shared["table"], _hash_key(key), state=True) if number == 0 else None

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        values = work.regions["values"]
        present = work.present()
        positions, _ = self._largest(work, work.shared["table"], _hash_key(key), values.numel(), present)
        values[positions.numel() :] = 0
        values[: positions.numel()] = self._offered(work, positions, present)
        values.clamp_(-work.limit(), work.limit())
        work.memo["positions"] = positions

    def _offered(self, work: Work, positions: Tensor, among: Sequence[int]) -> Tensor:
        """Return ``v`` at some elements of the bucket, in the order of operations of the kernels."""
        residual, momentum = work.state["residual"], work.state.get("momentum")
        new = residual.new_empty(positions.numel())
        for position, where, inside in places(work, positions, among):
            new[where] = work.grad(position)[inside]
        if momentum is not None:
            new = momentum[positions] * self.momentum + new
        return residual[positions] + new

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        positions, values = self._chosen(work)
        for position in (part.position for part in parts):
            mine, momentum = work.residual_of(position), work.state_of("momentum", position)
            assert mine is not None
            ops.absorb(work.grad(position), mine, momentum, self.momentum)
        limit, results = work.limit(), (values * (result_scale / work.world)).to(dtype_of(work.bucket))
        for position, where, inside in places(work, positions, work.present()):
            work.grad(position)[inside] = results[where]
            work.saturate(position, result_scale)
            for buffer in work.momenta.get(position, ()):
                buffer[inside] = 0
        residual = work.state["residual"]
        waiting = residual[positions]
        residual[positions] = waiting - waiting.clamp(-limit, limit)  # of what was clamped the rest stays
        if "momentum" in work.state:
            work.state["momentum"][positions] = 0

    def _chosen(self, work: Work) -> tuple[Tensor, Tensor]:
        """Return the positions of the k largest sums among the candidates, and the sums."""
        candidates = work.memo["positions"]
        values = work.regions["values"][: candidates.numel()]
        chosen, kept = work.local["chosen"], work.local["kept"]
        k = min(chosen.numel(), candidates.numel())
        given, numbers = ([values], None, [k], [chosen[:k]], [kept[:k]]), [values.new_empty(3, dtype=torch.int64)]
        ops.top_select_all(*given, numbers)
        ((found, _),) = ops.selected(ops.top_select_all, given, numbers)
        return candidates[chosen[:found].long()], kept[:found]


@dataclass(frozen=True)
class InSketch(_Sketching):
    """Error and momentum are tables too, the same on every rank; values are what is read from them."""

    def properties(self) -> Properties:
        # What a table holds cannot follow where a divisor moves, as it is of no element.
        law = Law(bound="of each row: |x|^2 / columns a value")
        moves = TableMoves(read=self._read_tables, write=self._write_tables)
        return replace(super().properties(), law=law, has_private_state=True, moves_tables=moves)

    def _tables(self) -> list[str]:
        return ["error", "momentum"] if self.momentum else ["error"]

    def layout(self, bucket: Bucket, world: int) -> Layout:
        table = self._table(bucket)
        return Layout({"table": table}, tables=dict.fromkeys(self._tables(), table), local=self._local(bucket))

    def before(self, number: int, work: Work, key: Key) -> dict[int, int]:
        table = work.regions["table"]
        counts = self._sketch(work, table, _lasting_key(key), state=False)
        # Cells pile up: the sum over ranks has to be finite too, for the error would never be again.
        if not counts and not float(torch.linalg.vector_norm(table, math.inf)) <= _cell_limit(table) / work.world:
            counts = {work.present()[0]: 1}
        return counts

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        key, present = _lasting_key(key), work.present()
        mean, error, momentum = work.regions["table"], work.tables["error"], work.tables.get("momentum")
        mean.mul_(1 / work.world)
        most = _cell_limit(mean)
        if momentum is not None:
            mean = momentum.mul_(self.momentum).add_(mean).clamp_(-most, most)
        error.add_(mean).clamp_(-most, most)
        positions, values = self._largest(work, error, key, self.most(work.bucket), present)
        for name in self._tables():
            ops.sketch_clear(work.tables[name], self.rows, key, positions)
        for part in parts:
            work.grad(part.position).zero_()
        found = places(work, positions, present)
        rests = clamped_all([values[where] for _, where, _ in found], [work.limit()] * len(found))
        for (position, where, inside), rest in zip(found, rests, strict=True):
            grad, mine = work.grad(position), values[where]
            grad[inside] = (mine * result_scale).to(grad.dtype)
            work.saturate(position, result_scale)
            if rest is not None:
                self._add(work, error, position, (inside, rest), key)  # what the clamp took away

    def _add(self, work: Work, table: Tensor, position: int, held: tuple[Tensor, ...], key: Key) -> None:
        """Add the sketch of some elements of a tensor: where they are, and their values."""
        inside, values = held
        whole = torch.zeros(work.bucket.tensors[position].count, dtype=values.dtype, device=values.device)
        whole[inside] = values
        ops.sketch_encode(whole, None, table, self.rows, key, offset=work.bucket.offsets[position])

    def _read_tables(self, work: Work, key: Key) -> list[Held]:
        key, every = _lasting_key(key), range(len(work.bucket.tensors))
        held: list[Held] = [{} for _ in every]
        for name in self._tables():
            # Of all values the smaller ones are noise for the most part: in a new table they would add to it.
            positions, values = self._largest(work, work.tables[name], key, self.most(work.bucket), every)
            for position, where, inside in places(work, positions, every):
                held[position][name] = inside, values[where].clone()
        return held

    def _write_tables(self, work: Work, held: Sequence[Held], key: Key) -> None:
        for name in self._tables():
            table = work.tables[name]
            for position, found in enumerate(held):
                if name in found:
                    self._add(work, table, position, found[name], _lasting_key(key))
            table.clamp_(-_cell_limit(table), _cell_limit(table))


def _cell_limit(table: Tensor) -> float:
    """Return the largest value of a cell that is kept."""
    return torch.finfo(table.dtype).max / 4


def _hash_key(key: Key) -> Key:
    """Return the key of the hashes: all ranks must hash alike."""
    return key.at(rank=0, purpose=SKETCH)


def _lasting_key(key: Key) -> Key:
    """Return that of tables that are kept: those of different steps add, so all hash alike."""
    return _hash_key(key.at(step=0))


@register
@dataclass(frozen=True)
class SketchFusion(ByForm):
    """Count sketches of 3.2 bits per element, which add; then the largest 5 % of the elements exactly.

    Args:
        density: share of a bucket's elements in the result, above 0, at most 1.
        cells: cells of the sketch per element: 0.1 is 3.2 bits per element.
        rows: rows of the sketch: 1, 3 or 5; an element's value is the median over the rows.
        candidates: for a result of k elements, candidates * k exact values are exchanged, and the k largest count.
        momentum: factor of the method's own momentum; 0 if the optimizer has momentum.
        error_feedback: "dense" keeps residual and momentum for every element; "sketch" keeps them in tables, which
            needs less memory and one exchange, but values are only as exact as the sketch.
    """

    density: float = 0.05
    cells: float = 0.1
    rows: Literal[1, 3, 5] = 5
    candidates: int = 2
    momentum: float = 0.0
    error_feedback: Literal["dense", "sketch"] = "dense"

    name: ClassVar[str] = "sketch_fusion"
    summary: ClassVar[str] = "sums of count sketches, then the largest values exactly"
    source: ClassVar[str] = "Dai et al., JPDC 185, 2024, 104811, after Ivkin et al., NeurIPS 2019, arXiv:1903.04488"
    page: ClassVar[str] = "sketch_fusion.md"
    samples: ClassVar[tuple[dict[str, Any], ...]] = (
        {"density": 0.02, "cells": 0.2},
        {"density": 0.05, "cells": 0.5, "rows": 3, "momentum": 0.5, "candidates": 4},
        {"density": 0.05, "cells": 0.5, "error_feedback": "sketch"},
        {"density": 0.05, "cells": 0.5, "rows": 1, "error_feedback": "sketch", "momentum": 0.5},
    )

    def __post_init__(self) -> None:
        for name, low_is_allowed, most in (("density", False, 1.0), ("cells", False, 4.0), ("momentum", True, 0.999)):
            value = getattr(self, name)
            number = type(value) in (int, float)
            if not number or not 0 <= value <= most or (value == 0 and not low_is_allowed):
                least = "0 or more" if low_is_allowed else "above 0"
                raise ConfigError(f"{name} should be a number, {least}, at most {most:g}, got {value!r}")
        check_choice("rows", self.rows, 1, 3, 5)
        if type(self.candidates) is not int or self.candidates < 1:
            raise ConfigError(f"candidates should be a whole number, at least 1, got {self.candidates!r}")
        check_choice("error_feedback", self.error_feedback, "dense", "sketch")

    @cached_property
    def form(self) -> _Sketching:
        dense = self.error_feedback == "dense"
        options = (self.density, self.cells, self.rows, self.candidates if dense else 1, self.momentum)
        return FullState(*options) if dense else InSketch(*options)
