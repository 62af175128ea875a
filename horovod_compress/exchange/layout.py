"""How a payload is cut: regions into chunks (one per rank), chunks into segments (one per frame).

The words are used throughout this package and mean nothing else:

- a *region* is one typed array of the payload, such as the bits or the step sizes;
- a *chunk* is one rank's share of all regions;
- a *segment* is what one frame carries of a chunk: consecutive *pieces* of its regions;
- a *record* is a run of elements of a region that mean something together only, such as codes and
  their scale: no cut goes through one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_SEGMENT_BYTES = 256 * 1024
MAX_SEGMENTS = 16


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a region.

    Attributes:
        values: these elements in the payload, in the region's dtype.
        data: the same memory as bytes.
        at: where the bytes start in the segment.
    """

    region: str
    start: int
    stop: int
    values: Tensor
    data: Tensor
    at: int


@dataclass(frozen=True)
class Segment:
    """What one frame carries."""

    pieces: tuple[Piece, ...]
    nbytes: int

    @property
    def data(self) -> list[Tensor]:
        return [piece.data for piece in self.pieces]


@dataclass(frozen=True)
class Layout:
    """The segments of every chunk of one payload.

    Attributes:
        regions: the payload that is cut.
    """

    regions: Mapping[str, Tensor]
    chunks: tuple[tuple[Segment, ...], ...]
    segment_bytes: int  # the largest segment
    most_segments: int  # of any chunk

    @classmethod
    def of(cls, regions: Mapping[str, Tensor], world: int, records: Mapping[str, int] | None = None) -> Layout:
        """Cut regions, given as typed one-dimensional tensors, into ``world`` chunks.

        Args:
            records: elements of a record, for regions that consist of records.
        """
        parts = [(name, tensor, (records or {}).get(name, 1)) for name, tensor in regions.items()]
        chunks = tuple(_segments([_share(part, index, world) for part in parts]) for index in range(world))
        segments = [segment for chunk in chunks for segment in chunk]
        return cls(regions, chunks, max(s.nbytes for s in segments), max(len(c) for c in chunks))


@dataclass(frozen=True)
class _Share:
    """What a chunk has of one region."""

    region: str
    start: int
    stop: int
    tensor: Tensor
    record: int

    @property
    def record_bytes(self) -> int:
        return self.record * self.tensor.element_size()


def _share(part: tuple[str, Tensor, int], index: int, world: int) -> _Share:
    name, tensor, record = part
    return _Share(name, *chunk_bounds(tensor.numel(), index, world, record), tensor, record)


def chunk_bounds(count: int, index: int, world: int, record: int = 1) -> tuple[int, int]:
    """Return the first element of a region in a chunk, and the end; records are shared out evenly."""
    records = count // record
    return records * index // world * record, records * (index + 1) // world * record


def _segments(shares: Sequence[_Share]) -> tuple[Segment, ...]:
    """Cut the shares of a chunk into segments of bounded size and bounded number.

    A chunk without elements still has one, empty, segment: every rank then sees as many messages
    as it expects, and non-finite counts always have a header to travel in.
    """
    total = sum((s.stop - s.start) * s.tensor.element_size() for s in shares)
    room = max(MIN_SEGMENT_BYTES, -(-total // MAX_SEGMENTS), *(s.record_bytes for s in shares))
    segments: list[Segment] = []
    pieces: list[Piece] = []
    filled = 0
    for share in shares:
        start = share.start
        while start < share.stop:
            if filled + share.record_bytes > room:
                segments.append(Segment(tuple(pieces), filled))
                pieces, filled = [], 0
            end = min(share.stop, start + (room - filled) // share.record_bytes * share.record)
            values = share.tensor[start:end]
            data = _as_bytes(values)
            pieces.append(Piece(share.region, start, end, values, data, filled))
            filled += data.numel()
            start = end
    if pieces or not segments:
        segments.append(Segment(tuple(pieces), filled))
    return tuple(segments)


def _as_bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
