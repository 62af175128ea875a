"""all_gatherv: every rank gets the payloads of all, each as long as it happens to be.

Lengths go first, in a message of a few bytes; then every rank sends its payload to every other. A
receive is thus posted with its exact length, and no payload is padded. This rank's link carries M-1
payloads each way, as in a ring of all-gathers, in one phase.

Unlike the other collectives it reduces nothing, so ``run`` takes and returns whole payloads.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from ..errors import CorruptFrameError
from . import gather
from .base import Exchange
from .wire import GATHER, FrameBuffer, NonFiniteCount

name = "gather"


class Inbox:
    """Memory for the payloads of all other ranks.

    Each bucket has its own: its payloads are decoded while the next bucket's arrive.

    Args:
        capacity: the most bytes of a payload.
    """

    def __init__(self, rank: int, world: int, capacity: int) -> None:
        self.capacity = capacity
        self.frames = {peer: FrameBuffer(capacity) for peer in range(world) if peer != rank}
        self.out = FrameBuffer(capacity) if world > 1 else None

    def of(self, capacity: int) -> Inbox:
        """Return the same memory for smaller payloads, of which only one is received at a time."""
        smaller = copy.copy(self)
        smaller.capacity = capacity
        return smaller


def order(rank: int, world: int) -> list[int]:
    """See :class:`.base.Collective`; there are no chunks."""
    return []


def run(exchange: Exchange, own: Tensor, inbox: Inbox) -> tuple[NonFiniteCount, list[Tensor]]:
    """Return the non-finite count over all ranks, and every rank's payload in rank order.

    If that count is not 0, there are no payloads: all ranks know it from the lengths' messages.

    Raises:
        PeerError: a peer is gone or late.
        CorruptFrameError: bytes arrived that are not the frame that was due.
    """
    transport = exchange.transport
    mine = torch.tensor([own.numel()], dtype=torch.int64).view(torch.uint8)
    exchange.note("hop", 0)
    lengths, bad = gather.run(exchange, mine)
    if bad.count:
        return bad, []
    if inbox.out is None:
        return bad, [own]
    sizes = {rank: int(length.view(torch.int64)) for rank, length in enumerate(lengths)}
    receives = {}
    for peer, frame in inbox.frames.items():
        if not 0 <= sizes[peer] <= inbox.capacity:
            raise CorruptFrameError(
                f"rank {peer} announced a payload of {sizes[peer]} bytes for bucket {exchange.bucket}, at "
                f"most {inbox.capacity} are possible; check that every rank runs the same version"
            )
        receives[peer] = transport.receive(frame.frame(sizes[peer]), peer)
    exchange.note("hop", 1)
    packed = inbox.out.pack(exchange.address(transport.rank, GATHER, 1, 0, 0), exchange.bad, [own])
    sends = [transport.send(packed, peer) for peer in inbox.frames]
    exchange.bytes_sent += packed.numel() * len(sends)
    payloads = {transport.rank: own}
    for peer, frame in inbox.frames.items():
        receives[peer].wait(exchange.deadline)
        frame.check(exchange.address(peer, GATHER, 1, 0, 0), sizes[peer])
        payloads[peer] = frame.payload(0, sizes[peer])
    for pending in sends:
        pending.wait(exchange.deadline)
    return bad, [payloads[rank] for rank in range(transport.size)]
