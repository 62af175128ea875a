"""Small arrays: every rank sends all to every other, and each reduces the same by itself.

One phase, and so one latency, for M-1 times the bytes: for what is too small to be cut into chunks.
All ranks reduce in rank order, so all come to the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .collective import Exchange, Partition, Reduction, received
from .wire import REDUCE, VERIFY, FrameBuffer, NonFiniteCount

name = "everywhere"


def order(rank: int, world: int) -> list[int]:
    """See :class:`.collective.Collective`; there is one chunk, whatever the number of ranks."""
    return [0]


def needed(rank: int, world: int) -> list[int]:
    """See :class:`.collective.Collective`."""
    return [0]


def merged(rank: int, world: int) -> list[range]:
    """See :class:`.collective.Collective`."""
    return [range(1)]


def run(exchange: Exchange, partition: Partition, reduction: Reduction) -> NonFiniteCount:
    """See :class:`.collective.Collective`; the partition has one chunk of one segment."""
    transport = exchange.transport
    if transport.size == 1:
        return exchange.bad
    ((segment,),) = partition.chunks
    into, out = frames(exchange, name, segment.nbytes)
    bad = to_all(exchange, REDUCE, segment.data, out, into, segment.nbytes, before=lambda: reduction.prepare(0))
    for piece in segment.pieces:  # in rank order
        first, *others = (received(piece, into.get(rank, out)) for rank in range(transport.size))
        piece.values.copy_(first)
        reduction.fold(piece, others)
    reduction.complete(0, bad)
    return bad


def all_gather(exchange: Exchange, data: Tensor) -> tuple[list[Tensor], NonFiniteCount]:
    """Return the ``uint8`` data of every rank, in rank order, and the non-finite count over all ranks.

    Sizes must be equal, and small: every rank sends its own to every other.
    """
    size = data.numel()
    into, out = frames(exchange, "gather", size)
    bad = to_all(exchange, VERIFY, [data], out, into, size)
    ranks = range(exchange.transport.size)
    return [torch.clone(into[rank].payload(0, size)) if rank in into else data for rank in ranks], bad


def frames(exchange: Exchange, use: str, nbytes: int) -> tuple[dict[int, FrameBuffer], FrameBuffer]:
    """Return buffers from the pool for the payloads of all other ranks, and one for this rank's."""
    transport = exchange.transport
    peers = [rank for rank in range(transport.size) if rank != transport.rank]
    into = exchange.pool.take(f"{use} in", len(peers), nbytes)
    return dict(zip(peers, into, strict=True)), exchange.pool.take(f"{use} out", 1, nbytes)[0]


def to_all(
    exchange: Exchange,
    phase: int,
    data: list[Tensor],
    out: FrameBuffer,
    into: Mapping[int, FrameBuffer],
    sizes: int | Mapping[int, int],
    hop: int = 0,
    before: Callable[[], None] = lambda: None,
) -> NonFiniteCount:
    """Send this rank's data to every other, and receive theirs; return the non-finite count over all ranks.

    Args:
        out: takes this rank's frame.
        into: by rank, take the frames of the others.
        sizes: of the others' payloads, in bytes.
        before: called when the receives are posted, before the data is read.
    """
    transport = exchange.transport
    size = dict.fromkeys(into, sizes) if isinstance(sizes, int) else sizes
    receives = {peer: transport.receive(frame.frame(size[peer]), peer) for peer, frame in into.items()}
    before()
    frame = out.pack(exchange.address(transport.rank, phase, hop, 0, 0), exchange.bad, data)
    sends = [transport.send(frame, peer) for peer in into]
    exchange.bytes_sent += frame.numel() * len(sends)
    bad = exchange.bad
    for peer, pending in receives.items():
        pending.wait(exchange.deadline)
        bad = bad.plus(into[peer].check(exchange.address(peer, phase, hop, 0, 0), size[peer]))
    for pending in sends:
        pending.wait(exchange.deadline)
    return bad
