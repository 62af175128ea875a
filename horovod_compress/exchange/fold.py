"""The fold: every rank sends each chunk to its owner, owners reduce, results go to everyone.

It moves the same volume as the ring in two phases instead of 2(M-1) hops, and hands the reduction
all payloads of a chunk at once.
"""

from __future__ import annotations

from torch import Tensor

from .collective import Exchange, Partition, Reduction, Segment, copy_in, received
from .transports.transport import Pending
from .wire import GATHER, REDUCE, FrameBuffer, NonFiniteCount

name = "fold"


def order(rank: int, world: int) -> list[int]:
    """See :class:`.collective.Collective`."""
    return [rank, *(peer for peer in range(world) if peer != rank)]


def needed(rank: int, world: int) -> list[int]:
    """See :class:`.collective.Collective`."""
    return [*_after(rank, world), rank]


def _after(rank: int, world: int) -> list[int]:
    """Return the peers starting behind this rank, so that not all send to the same one first."""
    return [(rank + number) % world for number in range(1, world)]


def merged(rank: int, world: int) -> list[range]:
    """See :class:`.collective.Collective`."""
    return [range(rank, rank + 1)]


def run(exchange: Exchange, partition: Partition, reduction: Reduction) -> NonFiniteCount:
    """See :class:`.collective.Collective`."""
    if exchange.transport.size == 1:
        return exchange.bad
    return _Fold(exchange, partition, reduction).run()


class _Fold:
    def __init__(self, exchange: Exchange, partition: Partition, reduction: Reduction) -> None:
        self._x, self._partition, self._reduction = exchange, partition, reduction
        self._rank, world = exchange.transport.rank, exchange.transport.size
        self._peers = [rank for rank in range(world) if rank != self._rank]
        self._after_own = _after(self._rank, world)
        self._own = partition.chunks[self._rank]
        self._bad = exchange.bad
        self._sends: list[Pending] = []

    def run(self) -> NonFiniteCount:
        parts = self._post("fold in", REDUCE, dict.fromkeys(self._peers, self._rank))
        results = self._post("fold results", GATHER, {peer: peer for peer in self._peers})
        self._scatter()
        self._reduction.prepare(self._rank)
        self._x.note("hop", 0)
        out = self._x.pool.take("fold own", len(self._own), self._partition.segment_bytes)
        for number, segment in enumerate(self._own):
            frames = [self._take(parts, REDUCE, peer, self._rank, number) for peer in self._peers]
            for piece in segment.pieces:
                self._reduction.fold(piece, [received(piece, frame) for frame in frames])
            self._share(number, segment, out[number])
        self._x.note("hop", 1)
        self._reduction.complete(self._rank, self._bad)
        for peer in self._peers:
            for number, segment in enumerate(self._partition.chunks[peer]):
                copy_in(segment, self._take(results, GATHER, peer, peer, number))
            self._reduction.complete(peer, self._bad)
        for pending in self._sends:
            pending.wait(self._x.deadline)
        return self._bad

    def _post(
        self, use: str, phase: int, chunk_of: dict[int, int]
    ) -> dict[tuple[int, int], tuple[Pending, FrameBuffer]]:
        """Post the receives of one phase: from each peer, one chunk."""
        most, room = self._partition.most_segments, self._partition.segment_bytes
        frames = iter(self._x.pool.take(use, most * len(self._peers), room))
        posted = {}
        for peer, chunk in chunk_of.items():
            for number, segment in enumerate(self._partition.chunks[chunk]):
                frame = next(frames)
                pending = self._x.transport.receive(frame.frame(_nbytes(segment, phase)), peer)
                posted[peer, number] = (pending, frame)
        return posted

    def _scatter(self) -> None:
        most, room = self._partition.most_segments, self._partition.segment_bytes
        frames = iter(self._x.pool.take("fold out", most * len(self._peers), room))
        for peer in self._after_own:
            self._reduction.prepare(peer)
            for number, segment in enumerate(self._partition.chunks[peer]):
                address = self._x.address(self._rank, REDUCE, 0, peer, number)
                self._send(next(frames).pack(address, self._x.bad, segment.data), peer)

    def _share(self, number: int, segment: Segment, frame: FrameBuffer) -> None:
        """Send a segment of the result while later ones are still to be reduced.

        Every peer's non-finite count is known by then: it came with its first segment.
        """
        address = self._x.address(self._rank, GATHER, 1, self._rank, number)
        packed = frame.pack(address, self._bad, segment.result)
        for peer in self._after_own:
            self._send(packed, peer)

    def _send(self, frame: Tensor, peer: int) -> None:
        self._sends.append(self._x.transport.send(frame, peer))
        self._x.bytes_sent += frame.numel()

    def _take(
        self, posted: dict[tuple[int, int], tuple[Pending, FrameBuffer]], phase: int, peer: int, chunk: int, number: int
    ) -> FrameBuffer:
        pending, frame = posted[peer, number]
        pending.wait(self._x.deadline)
        nbytes = _nbytes(self._partition.chunks[chunk][number], phase)
        bad = frame.check(self._x.address(peer, phase, phase, chunk, number), nbytes)
        if phase == REDUCE and number == 0:
            self._bad = self._bad.plus(bad)
        return frame


def _nbytes(segment: Segment, phase: int) -> int:
    return segment.nbytes if phase == REDUCE else segment.result_nbytes
