"""How a payload is cut: regions into chunks (one per rank), chunks into segments (one per frame).

The words are used throughout this package and mean nothing else:

- a *region* is one typed array of the payload, such as the bits or the step sizes;
- a *chunk* is one rank's share of all regions;
- a *segment* is what one frame carries of a chunk: consecutive *pieces* of its regions;
- a *record* is a run of elements of a region that mean something together only, such as codes and
  their scale: no cut goes through one;
- a *result* is what the owner of a chunk passes on of a region: its elements, or an array of another type in their
  place, which is cut at the same records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops import algebra

MIN_SEGMENT_BYTES = 256 * 1024
MAX_SEGMENTS = 16


@dataclass(frozen=True)
class Piece(algebra.Piece):
    """Elements ``start`` to ``stop`` of a region, and where they are in a frame.

    Attributes:
        data: the memory of the values as bytes.
        at: where the bytes start in the segment.
        result_data: the memory of the result as bytes.
        result_at: where those start in the segment's result.
    """

    stop: int
    data: Tensor
    at: int
    result_data: Tensor
    result_at: int


@dataclass(frozen=True)
class Segment:
    """What one frame carries."""

    pieces: tuple[Piece, ...]
    nbytes: int
    result_nbytes: int

    @property
    def data(self) -> list[Tensor]:
        return [piece.data for piece in self.pieces]

    @property
    def result(self) -> list[Tensor]:
        return [piece.result_data for piece in self.pieces]


@dataclass(frozen=True)
class Layout:
    """The segments of every chunk of one payload.

    Attributes:
        regions: the payload that is cut.
    """

    regions: Mapping[str, Tensor]
    chunks: tuple[tuple[Segment, ...], ...]
    segment_bytes: int  # the largest segment, or result of one
    most_segments: int  # of any chunk

    @classmethod
    def of(
        cls,
        regions: Mapping[str, Tensor],
        world: int,
        records: Mapping[str, int] | None = None,
        results: Mapping[str, Tensor] | None = None,
    ) -> Layout:
        """Cut regions, given as typed one-dimensional tensors, into ``world`` chunks.

        Args:
            records: elements of a record, for regions that consist of records.
            results: by region, arrays that hold what owners pass on, where that is not the region itself.
        """
        parts = [
            _Part(name, tensor, (results or {}).get(name, tensor), (records or {}).get(name, 1))
            for name, tensor in regions.items()
        ]
        chunks = tuple(_segments([_share(part, index, world) for part in parts]) for index in range(world))
        segments = [segment for chunk in chunks for segment in chunk]
        most = max(max(s.nbytes, s.result_nbytes) for s in segments)
        return cls(regions, chunks, most, max(len(c) for c in chunks))


@dataclass(frozen=True)
class _Part:
    """One region of the payload."""

    region: str
    tensor: Tensor
    result: Tensor
    record: int

    @property
    def record_bytes(self) -> int:
        return self.record * self.tensor.element_size()

    def piece(self, start: int, stop: int, at: int, result_at: int) -> Piece:
        """Return some of the elements, and where they start in a segment and its result."""
        values, data = self.tensor[start:stop], _as_bytes(self.tensor[start:stop])
        if self.result is self.tensor:
            return Piece(self.region, start, values, values, stop, data, at, data, result_at)
        first, end = (index * self.result.numel() // self.tensor.numel() for index in (start, stop))
        result = self.result[first:end]
        return Piece(self.region, start, values, result, stop, data, at, _as_bytes(result), result_at)


@dataclass(frozen=True)
class _Share:
    """What a chunk has of one region."""

    part: _Part
    start: int
    stop: int


def _share(part: _Part, index: int, world: int) -> _Share:
    return _Share(part, *chunk_bounds(part.tensor.numel(), index, world, part.record))


def chunk_bounds(count: int, index: int, world: int, record: int = 1) -> tuple[int, int]:
    """Return the first element of a region in a chunk, and the end; records are shared out evenly."""
    records = count // record
    return records * index // world * record, records * (index + 1) // world * record


def _segments(shares: Sequence[_Share]) -> tuple[Segment, ...]:
    """Cut the shares of a chunk into segments of bounded size and bounded number.

    A chunk without elements still has one, empty, segment: every rank then sees as many messages
    as it expects, and non-finite counts always have a header to travel in.
    """
    total = sum((s.stop - s.start) * s.part.tensor.element_size() for s in shares)
    room = max(MIN_SEGMENT_BYTES, -(-total // MAX_SEGMENTS), *(s.part.record_bytes for s in shares))
    segments: list[Segment] = []
    pieces: list[Piece] = []
    filled = result = 0
    for share in shares:
        start, part = share.start, share.part
        while start < share.stop:
            if filled + part.record_bytes > room:
                segments.append(Segment(tuple(pieces), filled, result))
                pieces, filled, result = [], 0, 0
            end = min(share.stop, start + (room - filled) // part.record_bytes * part.record)
            pieces.append(part.piece(start, end, filled, result))
            filled += pieces[-1].data.numel()
            result += pieces[-1].result_data.numel()
            start = end
    if pieces or not segments:
        segments.append(Segment(tuple(pieces), filled, result))
    return tuple(segments)


def _as_bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
