"""How a payload is cut: regions into chunks (one per rank), chunks into segments (one per frame).

The words are used throughout this package and mean nothing else:

- a *region* is one typed array of the payload, such as the bits or the step sizes;
- a *chunk* is one rank's share of all regions;
- a *segment* is what one frame carries of a chunk: consecutive *pieces* of its regions.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """The segments of every chunk of one payload."""

    chunks: tuple[tuple[Segment, ...], ...]
    segment_bytes: int  # the largest segment
    most_segments: int  # of any chunk

    @classmethod
    def of(cls, regions: dict[str, Tensor], world: int) -> Layout:
        """Cut regions, given as typed one-dimensional tensors, into ``world`` chunks."""
        chunks = tuple(_segments(_chunk(regions, index, world)) for index in range(world))
        segments = [segment for chunk in chunks for segment in chunk]
        return cls(chunks, max(s.nbytes for s in segments), max(len(c) for c in chunks))


def _chunk(regions: dict[str, Tensor], index: int, world: int) -> list[tuple[str, int, int, Tensor]]:
    """Return (region, start, stop, tensor) of one chunk."""
    return [(name, *chunk_bounds(tensor.numel(), index, world), tensor) for name, tensor in regions.items()]


def chunk_bounds(count: int, index: int, world: int) -> tuple[int, int]:
    """Return the first element of a region in a chunk, and the end; regions are shared out evenly."""
    return count * index // world, count * (index + 1) // world


def _segments(parts: Sequence[tuple[str, int, int, Tensor]]) -> tuple[Segment, ...]:
    """Cut the parts of a chunk into segments of bounded size and bounded number.

    A chunk without elements still has one, empty, segment: every rank then sees as many messages
    as it expects, and non-finite counts always have a header to travel in.
    """
    total = sum((stop - start) * tensor.element_size() for _, start, stop, tensor in parts)
    room = max(MIN_SEGMENT_BYTES, -(-total // MAX_SEGMENTS))
    segments: list[Segment] = []
    pieces: list[Piece] = []
    filled = 0
    for name, start, stop, tensor in parts:
        size = tensor.element_size()
        while start < stop:
            if filled + size > room:
                segments.append(Segment(tuple(pieces), filled))
                pieces, filled = [], 0
            end = min(stop, start + (room - filled) // size)
            values = tensor[start:end]
            pieces.append(Piece(name, start, end, values, _as_bytes(values), filled))
            filled += (end - start) * size
            start = end
    if pieces or not segments:
        segments.append(Segment(tuple(pieces), filled))
    return tuple(segments)


def _as_bytes(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
