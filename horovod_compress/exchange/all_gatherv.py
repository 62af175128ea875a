"""all_gatherv: every rank gets the payloads of all, each as long as it happens to be.

Lengths go first, in a message of a few bytes; then every rank sends its payload to every other. A
receive is thus posted with its exact length, and no payload is padded. This rank's link carries M-1
payloads each way, as in a ring of all-gathers, in one phase.

Unlike the other collectives it reduces nothing, so ``run`` takes and returns whole payloads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import CorruptFrameError
from . import everywhere
from .collective import Exchange
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
    """See :class:`.collective.Collective`; there are no chunks."""
    return []


def run(exchange: Exchange, own: Tensor, inbox: Inbox) -> tuple[NonFiniteCount, list[Tensor]]:
    """Return the non-finite count over all ranks, and every rank's payload in rank order.

    If that count is not 0, there are no payloads: all ranks know it from the lengths' messages.

    Raises:
        PeerError: a peer is gone or late.
        CorruptFrameError: bytes arrived that are not the frame that was due.
    """
    mine = torch.tensor([own.numel()], dtype=torch.int64, device="cpu").view(torch.uint8)
    exchange.note("hop", 0)
    lengths, bad = everywhere.all_gather(exchange, mine)
    if bad.count:
        return bad, []
    if inbox.out is None:
        return bad, [own]
    sizes = [int(length.view(torch.int64)) for length in lengths]
    check_sizes(exchange, sizes, inbox.capacity)
    everywhere.to_all(
        exchange, GATHER, [own], inbox.out, inbox.frames, dict(enumerate(sizes)), 1, lambda: exchange.note("hop", 1)
    )
    payloads = {peer: frame.payload(0, sizes[peer]) for peer, frame in inbox.frames.items()}
    payloads[exchange.transport.rank] = own
    return bad, [payloads[rank] for rank in range(len(sizes))]


def check_sizes(exchange: Exchange, sizes: Sequence[int], capacity: int) -> None:
    """Refuse payloads that are longer than possible, by the sizes that ranks announce.

    Raises:
        CorruptFrameError: names the first one.
    """
    for peer, size in enumerate(sizes):
        if not 0 <= size <= capacity:
            raise CorruptFrameError(
                f"rank {exchange.number(peer)} announced a payload of {size} bytes for bucket {exchange.bucket}, at "
                f"most {capacity} are possible; check that every rank runs the same version"
            )
