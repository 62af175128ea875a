"""A small all-gather: every rank sends the same few bytes to every other."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Exchange
from .wire import VERIFY, NonFiniteCount


def run(exchange: Exchange, data: Tensor) -> tuple[list[Tensor], NonFiniteCount]:
    """Return the ``uint8`` data of every rank, in rank order, and the non-finite count over all ranks.

    Sizes must be equal.
    """
    transport, size = exchange.transport, data.numel()
    peers = [rank for rank in range(transport.size) if rank != transport.rank]
    frames = exchange.pool.take("gather in", len(peers), size)
    out = exchange.pool.take("gather out", 1, size)[0]
    receives = [transport.receive(frame.frame(size), peer) for frame, peer in zip(frames, peers, strict=True)]
    frame = out.pack(exchange.address(transport.rank, VERIFY, 0, 0, 0), exchange.bad, [data])
    sends = [transport.send(frame, peer) for peer in peers]
    exchange.bytes_sent += frame.numel() * len(peers)
    found, bad = {transport.rank: data}, exchange.bad
    for peer, frame_in, pending in zip(peers, frames, receives, strict=True):
        pending.wait(exchange.deadline)
        bad = bad.plus(frame_in.check(exchange.address(peer, VERIFY, 0, 0, 0), size))
        found[peer] = torch.clone(frame_in.payload(0, size))
    for pending in sends:
        pending.wait(exchange.deadline)
    return [found[rank] for rank in range(transport.size)], bad
