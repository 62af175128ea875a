"""The transport's own all-reduce: for payloads of plain numbers, which every engine can add up.

Its loops are not in Python, and its bytes are neither framed nor checked again. A small all-gather of the non-finite
counts goes beside it: its frames show that all ranks mean the same exchange.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import everywhere
from .collective import Exchange, Partition, Reduction
from .ring import needed as needed, order as order  # in any order: all chunks are needed, and complete, at once
from .wire import NonFiniteCount

name = "native"

#: From here on an array is added up in two parts at once, which Gloo has threads for.
LARGE_BYTES = 1 << 20

_NO_DATA = torch.zeros(0, dtype=torch.uint8, device="cpu")


def _parts(values: Tensor) -> Sequence[Tensor]:
    """Cut a large array in two: while one part waits for a neighbour, the other one goes on."""
    return values.chunk(2) if values.nbytes >= LARGE_BYTES else (values,)


def merged(rank: int, world: int) -> list[range]:
    """See :class:`.collective.Collective`."""
    return []


def run(exchange: Exchange, partition: Partition, reduction: Reduction) -> NonFiniteCount:
    """See :class:`.collective.Collective`."""
    transport = exchange.transport
    world = transport.size
    if world == 1:
        return exchange.bad
    for chunk in needed(transport.rank, world):
        reduction.prepare(chunk)
    exchange.note("hop", 0)
    sums = [
        transport.add_up(part, exchange.deadline) for values in partition.regions.values() for part in _parts(values)
    ]
    exchange.bytes_sent += sum(2 * (values.nbytes - values.nbytes // world) for values in partition.regions.values())
    _, bad = everywhere.all_gather(exchange, _NO_DATA)
    for pending in sums:
        pending.wait(exchange.deadline)
    for chunk in order(transport.rank, world):
        reduction.complete(chunk, bad)
    return bad
