"""Small arrays: every rank sends all to every other, and each reduces the same by itself.

One phase, and so one latency, for M-1 times the bytes: for what is too small to be cut into chunks.
All ranks reduce in rank order, so all come to the same bits.
"""

from __future__ import annotations

from .base import Exchange, Reduction, received
from .layout import Layout
from .wire import REDUCE, FrameBuffer, NonFiniteCount

name = "everywhere"


def order(rank: int, world: int) -> list[int]:
    """See :class:`.base.Collective`; there is one chunk, whatever the number of ranks."""
    return [0]


def needed(rank: int, world: int) -> list[int]:
    """See :class:`.base.Collective`."""
    return [0]


def merged(rank: int, world: int) -> list[range]:
    """See :class:`.base.Collective`."""
    return [range(1)]


def run(exchange: Exchange, layout: Layout, reduction: Reduction) -> NonFiniteCount:
    """See :class:`.base.Collective`; the layout has one chunk of one segment."""
    transport = exchange.transport
    if transport.size == 1:
        return exchange.bad
    ((segment,),) = layout.chunks
    peers = [rank for rank in range(transport.size) if rank != transport.rank]
    into = dict(zip(peers, exchange.pool.take("everywhere in", len(peers), segment.nbytes), strict=True))
    out = exchange.pool.take("everywhere out", 1, segment.nbytes)[0]
    receives = {peer: transport.receive(into[peer].frame(segment.nbytes), peer) for peer in peers}
    reduction.prepare(0)
    frame = out.pack(exchange.address(transport.rank, REDUCE, 0, 0, 0), exchange.bad, segment.data)
    sends = [transport.send(frame, peer) for peer in peers]
    exchange.bytes_sent += frame.numel() * len(peers)
    bad = exchange.bad
    for peer in peers:
        receives[peer].wait(exchange.deadline)
        bad = bad.plus(into[peer].check(exchange.address(peer, REDUCE, 0, 0, 0), segment.nbytes))
    for pending in sends:
        pending.wait(exchange.deadline)
    _reduce(layout, reduction, [into.get(rank, out) for rank in range(transport.size)])
    reduction.complete(0, bad)
    return bad


def _reduce(layout: Layout, reduction: Reduction, frames: list[FrameBuffer]) -> None:
    """Reduce the frames of all ranks, in rank order."""
    for piece in layout.chunks[0][0].pieces:
        first, *others = (received(piece, frame) for frame in frames)
        piece.values.copy_(first)
        reduction.fold(piece, others)
