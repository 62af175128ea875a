"""What a collective needs to know of one exchange, and the frames that it may use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from .deadline import Deadline
from .layout import Layout, Piece, Segment
from .transports.base import Transport
from .wire import HEADER_BYTES, Address, FrameBuffer, NonFiniteCount


class Reduction(Protocol):
    """The codec's part of an exchange: what becomes of two or more payloads."""

    def prepare(self, chunk: int) -> None:
        """Make sure that this rank's payload of a chunk is there, before it is sent or reduced for the first time."""

    def merge(self, piece: Piece, other: Tensor, weights: tuple[int, int], hop: int) -> None:
        """Merge a payload into this rank's own piece, in place.

        Args:
            weights: of how many ranks the own piece is, and the other.
        """

    def fold(self, piece: Piece, others: Sequence[Tensor]) -> None:
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
    bytes_sent: int = field(default=0)

    def address(self, sender: int, phase: int, hop: int, chunk: int, segment: int) -> Address:
        return Address(self.codec, phase, sender, self.step, self.bucket, hop, chunk, segment, self.digest)


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

    def run(self, exchange: Exchange, layout: Layout, reduction: Reduction) -> NonFiniteCount:
        """Run the exchange and return the non-finite count over all ranks.

        Args:
            layout: this rank's arrays, cut; afterwards they hold the consensus bytes.

        Raises:
            PeerError: a peer is gone or late.
            CorruptFrameError: bytes arrived that are not the frame that was due.
        """


def copy_in(segment: Segment, frame: FrameBuffer) -> None:
    """Copy a received result into the payload."""
    for piece in segment.pieces:
        piece.result_data.copy_(frame.payload(piece.result_at, piece.result_at + piece.result_data.numel()))


def received(piece: Piece, frame: FrameBuffer) -> Tensor:
    """Return the received counterpart of a piece, in the region's dtype."""
    return frame.payload(piece.at, piece.at + piece.data.numel()).view(piece.values.dtype)
