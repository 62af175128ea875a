"""What the methods share that send positions: one section per tensor, gathered.

A payload is a table of int32, the bytes of each tensor's section, and then the sections, laid out as
``rules/values.h`` says. Each method says how values are written, and what is left of them; or how a section
is written and read, if it is of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from ... import ops
from ...errors import ConfigError, CorruptFrameError
from ...ops.keys import Key
from ...schedule.plan import Bucket, TensorSpec
from ..base import Algebra, Codec, Law, Properties
from ..work import Counts, Layout, Part, Regions, Work, clamped, per_element, slices, work_dtype

LENGTH_BYTES = 4  # bytes of a section's length, in the table at the start of a payload


def check_density(density: object) -> None:
    """Refuse what is no share of the elements.

    Raises:
        ConfigError: says what would be one.
    """
    if type(density) not in (int, float) or not 0 < density <= 1:  # type: ignore[operator]
        raise ConfigError(f"density should be a number above 0, at most 1, got {density!r}")


def share(density: float, count: int) -> int:
    """Return ``ceil(density * count)``, with the density that the user wrote and not the nearest binary fraction."""
    exact = Fraction(repr(density))
    return -(-count * exact.numerator // exact.denominator)


def parameter(most: int, count: int) -> int:
    """Return the parameter of the Golomb code of positions: how many bits of a gap are written plainly."""
    return ops.golomb_parameter(most, count) if count else 0


@dataclass(frozen=True)
class Sections(Codec):
    """The k elements of largest magnitude of each tensor, by position."""

    density: float = 0.01

    algebra: ClassVar[Algebra] = Algebra.GATHER
    #: What a section says, in words.
    said: ClassVar[str] = "positions and values"

    def __post_init__(self) -> None:
        check_density(self.density)

    def properties(self) -> Properties:
        law = Law(conserves=True, bound="own: (1 - k/d) |x|^2", zeros=True)
        return Properties(law, feedback="own", divides="before", share_sent=self.share_sent())

    def form(self, bucket: Bucket) -> str:
        """Return how values are written, one of ``ops.sizes.FORMS``."""
        return "full"

    # ---- layout ----

    def layout(self, bucket: Bucket, world: int) -> Layout:
        room = sum(LENGTH_BYTES + self._checked_room(tensor, bucket) for tensor in bucket.tensors)
        payload, scratch = {"payload": (torch.uint8, room)}, self._scratch(bucket)
        return Layout(payload, state=per_element(bucket, "residual"), scratch=scratch)

    def _checked_room(self, tensor: TensorSpec, bucket: Bucket) -> int:
        if tensor.count >= 1 << 31:
            raise ConfigError(
                f"{self.name} takes tensors of fewer than 2^31 elements, {tensor.name} has {tensor.count}"
            )
        if (room := self._room(tensor, bucket)) >= 1 << 31:  # the table says lengths as int32
            raise ConfigError(
                f"{self.name} must stay below 2^31 bytes per tensor, but {tensor.name} with {tensor.count} elements "
                f"may need {room} at density {self.share_sent():g}; choose a lower density"
            )
        return room

    def _room(self, tensor: TensorSpec, bucket: Bucket) -> int:
        """Return the most bytes of a tensor's section."""
        most, count, wide = self.most(tensor), tensor.count, work_dtype(bucket).itemsize
        return ops.values_bound(most, count, parameter(most, count), wide, form=self.form(bucket))

    def share_sent(self) -> float:
        """Return of which share of a tensor's elements the positions are sent."""
        return self.density

    def most(self, tensor: TensorSpec) -> int:
        """Return k: of how many elements of a tensor the positions are sent at most."""
        return share(self.share_sent(), tensor.count)

    def _scratch(self, bucket: Bucket) -> Regions:
        number = sum(self.most(tensor) for tensor in bucket.tensors)
        return {"positions": (torch.int32, number), "values": (work_dtype(bucket), number)}

    def prepare(self, work: Work) -> None:
        tensors = work.bucket.tensors
        work.memo["places"] = slices([self.most(tensor) for tensor in tensors])
        work.memo["parameters"] = [parameter(self.most(tensor), tensor.count) for tensor in tensors]
        work.memo["kept"] = [0] * len(tensors)
        work.memo["rest"] = [None] * len(tensors)  # what a clamp took from the values, for the residual
        work.memo["form"] = self.form(work.bucket)

    # ---- one round ----

    def submit(self, work: Work, positions: Sequence[int], key: Key) -> Counts:
        return [self.select(work, position) for position in positions]

    def select(self, work: Work, position: int) -> int:
        """Choose what is sent of one tensor; return how many of its values are not finite."""
        own = work.memo["places"][position]
        given = (work.grad(position), work.residual_of(position), own.stop - own.start)
        kept, nonfinite = ops.top_select(*given, work.local["positions"][own], work.local["values"][own])
        work.memo["kept"][position] = kept
        work.memo["rest"][position] = None if nonfinite else clamped(work.local["values"][own][:kept], work.limit())
        return nonfinite

    def mean(self, work: Work, position: int) -> Tensor | None:
        """Return what all values of a tensor count as, where only their signs are sent."""
        return None

    def encode(self, work: Work, parts: Sequence[Part], key: Key) -> None:
        """Write one section per tensor behind a table of the sections' lengths."""
        payload, tensors = work.regions["payload"], work.bucket.tensors
        at = LENGTH_BYTES * len(tensors)
        lengths = payload[:at].view(torch.int32)
        lengths.zero_()  # sparse gradients, which Horovod reduces itself, have no section
        for part in parts:
            length = self.write(work, part.position, payload[at:])
            lengths[part.position] = length
            at += length
        work.used = at

    def write(self, work: Work, position: int, out: Tensor) -> int:
        """Write the section of one tensor; return its bytes."""
        own = work.memo["places"][position]
        return ops.values_encode(
            work.local["positions"][own],
            work.memo["kept"][position],
            work.local["values"][own],
            work.memo["parameters"][position],
            work.bucket.tensors[position].count,
            out,
            form=work.memo["form"],
            mean=self.mean(work, position),
        )

    def keeps(self, work: Work, position: int) -> dict[str, Any]:
        """Return what :func:`ops.values_decode` has to know of momentum that is kept here."""
        return {}

    def decode(self, work: Work, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        sections = [cut(payload, len(work.bucket.tensors)) for payload in work.gathered]
        for position in (part.position for part in parts):
            mine = [of_rank[position] for of_rank in sections]
            wrong = int(self.read(work, position, mine, key.rank, result_scale / work.world))
            if wrong:
                raise malformed(wrong, self.said, work, position, key)
            self._put_back(work, position)
            work.saturate(position, result_scale)
            if momenta := work.momenta.get(position):
                self._clear(work, position, momenta)

    def read(self, work: Work, position: int, sections: list[Tensor], rank: int, scale: float) -> int | Tensor:
        """Decode the sections of all ranks for one tensor; return how many ranges are malformed.

        Args:
            rank: of this rank, whose own section leaves the residual.
            scale: what sums over ranks are multiplied by.
        """
        return ops.values_decode(
            sections,
            rank,
            work.memo["parameters"][position],
            work.grad(position),
            work.residual_of(position),
            scale,
            form=work.memo["form"],
            **self.keeps(work, position),
        )

    def _put_back(self, work: Work, position: int) -> None:
        """Return to the residual what a clamp took, where decoding leaves nothing of a value that was sent."""
        rest, residual = work.memo["rest"][position], work.residual_of(position)
        if rest is not None and residual is not None and "momentum" in self.keeps(work, position):
            own = work.memo["places"][position]
            residual.index_add_(0, work.local["positions"][own][: rest.numel()].long(), rest)

    def _clear(self, work: Work, position: int, momenta: list[Tensor]) -> None:
        """Empty an optimizer's momentum where this rank sent a value."""
        own = work.memo["places"][position]
        sent = work.local["positions"][own][: work.memo["kept"][position]].long()
        for momentum in momenta:
            momentum.index_fill_(0, sent, 0)


def malformed(ranges: int, said: str, work: Work, position: int, key: Key) -> CorruptFrameError:
    """Return the error for sections of a tensor that say what no rank has written."""
    return CorruptFrameError(
        f"rank {key.rank}: {ranges} malformed range(s) of {said} for {work.bucket.tensors[position].name} (step "
        f"{key.step}, bucket {key.bucket}); check that every rank runs the same version of horovod-compress"
    )


def cut(payload: Tensor, number: int) -> list[Tensor]:
    """Cut a payload into the sections of its tensors; what does not fit leaves them short."""
    table = payload[: LENGTH_BYTES * number]
    lengths = table.view(torch.int32).tolist() if table.numel() == LENGTH_BYTES * number else [0] * number
    sections, at = [], LENGTH_BYTES * number
    for length in lengths:
        sections.append(payload[at : at + max(0, length)])
        at += max(0, length)
    return sections
