"""What collectives have in common: the payload that they move, cut, and what they know of one exchange.

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..ops import algebra
from .device import Deadline
from .transports.transport import Transport
from .wire import HEADER_BYTES, Address, FrameBuffer, NonFiniteCount

MIN_SEGMENT_BYTES = 256 * 1024
MAX_SEGMENTS = 16


@dataclass(frozen=True)
class FramePiece(algebra.Piece):
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

    pieces: tuple[FramePiece, ...]
    nbytes: int
    result_nbytes: int

    @property
    def data(self) -> list[Tensor]:
        return [piece.data for piece in self.pieces]

    @property
    def result(self) -> list[Tensor]:
        return [piece.result_data for piece in self.pieces]


@dataclass(frozen=True)
class Partition:
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
    ) -> Partition:
        """Cut regions, given as typed one-dimensional tensors, into ``world`` chunks.

        Args:
            records: elements of a record, for regions that consist of records.
            results: by region, arrays that hold what owners pass on, where that is not the region itself.
        """
        parts = [
            _Part(name, tensor, (results or {}).get(name, tensor), (records or {}).get(name, 1))
            for name, tensor in regions.items()
        ]
        chunks = tuple(_segments(parts, index, world) for index in range(world))
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

    def piece(self, start: int, stop: int, at: int, result_at: int) -> FramePiece:
        """Return some of the elements, and where they start in a segment and its result."""
        values, data = self.tensor[start:stop], self.tensor[start:stop].view(torch.uint8)
        if self.result is self.tensor:
            return FramePiece(self.region, start, values, values, stop, data, at, data, result_at)
        first, end = (index * self.result.numel() // self.tensor.numel() for index in (start, stop))
        result = self.result[first:end]
        return FramePiece(self.region, start, values, result, stop, data, at, result.view(torch.uint8), result_at)


def chunk_bounds(count: int, index: int, world: int, record: int = 1) -> tuple[int, int]:
    """Return the first element of a region in a chunk, and the end; records are shared out evenly."""
    records = count // record
    return records * index // world * record, records * (index + 1) // world * record


def _segments(parts: Sequence[_Part], index: int, world: int) -> tuple[Segment, ...]:
    """Cut a chunk into segments of bounded size and bounded number.

    A chunk without elements still has one, empty, segment: every rank then sees as many messages
    as it expects, and non-finite counts always have a header to travel in.
    """
    shares = [(part, *chunk_bounds(part.tensor.numel(), index, world, part.record)) for part in parts]
    total = sum((stop - start) * part.tensor.element_size() for part, start, stop in shares)
    room = max(MIN_SEGMENT_BYTES, -(-total // MAX_SEGMENTS), *(part.record_bytes for part in parts))
    segments: list[Segment] = []
    pieces: list[FramePiece] = []
    filled = result = 0
    for part, first, stop in shares:
        start = first
        while start < stop:
            if filled + part.record_bytes > room:
                segments.append(Segment(tuple(pieces), filled, result))
                pieces, filled, result = [], 0, 0
            end = min(stop, start + (room - filled) // part.record_bytes * part.record)
            pieces.append(part.piece(start, end, filled, result))
            filled += pieces[-1].data.numel()
            result += pieces[-1].result_data.numel()
            start = end
    if pieces or not segments:
        segments.append(Segment(tuple(pieces), filled, result))
    return tuple(segments)


class Reduction(Protocol):
    """The codec's part of an exchange: what becomes of two or more payloads."""

    def prepare(self, chunk: int) -> None:
        """Make sure that this rank's payload of a chunk is there, before it is sent or reduced for the first time."""

    def merge(self, piece: FramePiece, other: Tensor, weights: tuple[int, int], hop: int) -> None:
        """Merge a payload into this rank's own piece, in place.

        Args:
            weights: of how many ranks the own piece is, and the other.
        """

    def fold(self, piece: FramePiece, others: Sequence[Tensor]) -> None:
        """Merge the pieces of all other ranks, in rank order, into this rank's own, in place, or into its result.

        The pieces of the others may be overwritten.
        """

    def complete(self, chunk: int, bad: NonFiniteCount) -> None:
        """Take note that a chunk holds consensus bytes; must not block.

        Args:
            bad: the non-finite count over all ranks.
        """


class FramePool:
    """Frame buffers that are kept from step to step; they only ever grow."""

    def __init__(self) -> None:
        self._buffers: dict[str, list[FrameBuffer]] = {}

    def take(self, use: str, number: int, payload: int) -> list[FrameBuffer]:
        """Return ``number`` buffers with room for ``payload`` bytes each."""
        buffers = self._buffers.setdefault(use, [])
        if any(buffer.memory.numel() < HEADER_BYTES + payload for buffer in buffers[:number]):
            buffers.clear()
        buffers.extend(FrameBuffer(payload) for _ in range(number - len(buffers)))
        return buffers[:number]


@dataclass
class Exchange:
    """One bucket's exchange in one step.

    Attributes:
        codec: its id, for the frames.
        bad: the non-finite values that this rank offered.
        note: called with (event, hop) as the exchange goes on, for traces.
        digest: of what this rank decodes with, see ``Address``.
        ranks: of the job, as people know them, where those of the transport are some of them only.
    """

    transport: Transport
    codec: int
    step: int
    bucket: int
    bad: NonFiniteCount
    deadline: Deadline
    pool: FramePool
    note: Callable[[str, int], None]
    digest: int = 0
    ranks: Sequence[int] = ()
    bytes_sent: int = field(default=0)

    def number(self, rank: int) -> int:
        """Return the number in the job of a rank of the transport."""
        return self.ranks[rank] if self.ranks else rank

    def address(self, sender: int, phase: int, hop: int, chunk: int, segment: int) -> Address:
        number = self.number(sender)
        return Address(self.codec, phase, number, self.step, self.bucket, hop, chunk, segment, self.digest)


class Collective(Protocol):
    """Turns this rank's payload into the consensus bytes, in place. A module is one."""

    @property
    def name(self) -> str:
        """What stands in statistics and timelines."""

    def order(self, rank: int, world: int) -> list[int]:
        """Return the chunks in the order in which they become complete on a rank."""

    def needed(self, rank: int, world: int) -> list[int]:
        """Return the chunks in the order in which a rank's payload is sent or reduced for the first time."""

    def merged(self, rank: int, world: int) -> list[range]:
        """Return the chunks that hold what a rank merges: once, and then, where there is more, a second time."""

    def run(self, exchange: Exchange, partition: Partition, reduction: Reduction) -> NonFiniteCount:
        """Run the exchange and return the non-finite count over all ranks.

        Args:
            partition: this rank's arrays, cut; afterwards they hold the consensus bytes.

        Raises:
            PeerError: a peer is gone or late.
            CorruptFrameError: bytes arrived that are not the frame that was due.
        """


def copy_in(segment: Segment, frame: FrameBuffer) -> None:
    """Copy a received result into the payload."""
    for piece in segment.pieces:
        piece.result_data.copy_(frame.payload(piece.result_at, piece.result_at + piece.result_data.numel()))


def received(piece: FramePiece, frame: FrameBuffer) -> Tensor:
    """Return the received counterpart of a piece, in the region's dtype."""
    return frame.payload(piece.at, piece.at + piece.data.numel()).view(piece.values.dtype)
