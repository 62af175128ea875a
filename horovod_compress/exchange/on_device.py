"""The collectives over payloads in GPU memory: the same chunks, hops and merges as between hosts, and so the same bits.

Messages are known by their order alone, and carry nothing but payload. What frames carry elsewhere goes ahead of them,
in one small message to each peer through the transport for tokens: the count of values that are not finite, and how
many bytes are to be exchanged. Where a value is not finite, no payload is sent at all.

Each collective is a generator of transfers, see :class:`~.transports.transport.Transfer`: what it queues
between two of them follows on the first one's end. An *event* is a point of a stream, as in :mod:`.device`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..errors import ConfigError, CorruptFrameError
from . import everywhere, fold, ring
from .all_gatherv import check_sizes
from .collective import Collective, Exchange, Partition, Reduction, Segment
from .device import Event
from .transports.transport import NcclLink, Transfer
from .wire import NonFiniteCount

#: Where a segment begins in memory for what arrives: the largest vector of a kernel.
_ALIGNMENT = 256

Steps = Callable[[NcclLink, Partition, Reduction, NonFiniteCount], Iterator[Transfer]]


class OnDevice:
    """A collective over the link of the exchange's transport; see :class:`.collective.Collective`.

    Args:
        host: the one between hosts, which has the same chunks in the same order.
    """

    def __init__(self, host: Collective, steps: Steps) -> None:
        self.name, self.order, self.needed, self.merged = host.name, host.order, host.needed, host.merged
        self.steps = steps

    def run(self, exchange: Exchange, partition: Partition, reduction: Reduction) -> NonFiniteCount:
        if exchange.transport.size == 1:
            return exchange.bad
        link = exchange.transport.link
        assert link
        nbytes = sum(segment.nbytes for chunk in partition.chunks for segment in chunk)
        bad, _ = _agree(exchange, nbytes, alike=True)
        if bad.count:
            return bad
        link.run(_counted(exchange, self.steps(link, partition, reduction, bad)), exchange.deadline)
        link.finish(exchange.deadline)
        return bad


def of(collective: Collective) -> OnDevice:
    """Return the collective that does the same over GPU memory.

    Raises:
        ConfigError: there is none.
    """
    if collective.name not in _OF:
        raise ConfigError(
            f'exchange="{collective.name}" works in host memory only; choose transport="gloo" for it, or "ring"'
        )
    return _OF[collective.name]


def _agree(exchange: Exchange, nbytes: int, alike: bool) -> tuple[NonFiniteCount, list[int]]:
    """Return the non-finite count over all ranks, and every rank's number of bytes.

    Raises:
        CorruptFrameError: the numbers should be alike, and are not: NCCL would wait forever.
    """
    mine = torch.tensor([nbytes], dtype=torch.int64, device="cpu").view(torch.uint8)
    found, bad = everywhere.all_gather(exchange, mine)
    sizes = [int(data.view(torch.int64)) for data in found]
    if alike and len(set(sizes)) > 1:
        raise CorruptFrameError(
            f"the ranks have payloads of {sizes} bytes for bucket {exchange.bucket}, which should be equal; check "
            "that every rank runs the same version of horovod-compress"
        )
    return bad, sizes


def _counted(exchange: Exchange, steps: Iterator[Transfer]) -> Iterator[Transfer]:
    for number, transfer in enumerate(steps):
        exchange.note("hop", number)
        exchange.bytes_sent += sum(data.numel() for data, _ in transfer.sends)
        yield transfer


def _slots(link: NcclLink, number: int, nbytes: int) -> list[Tensor]:
    """Return memory for ``number`` arrivals."""
    size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = link.scratch(number * size)
    return [memory[at * size : (at + 1) * size] for at in range(number)]


def _cut(segment: Segment, slot: Tensor) -> list[Tensor]:
    """Return the parts of a slot that receive the pieces of a segment, as bytes."""
    return [slot[piece.at : piece.at + piece.data.numel()] for piece in segment.pieces]


def _typed(segment: Segment, slot: Tensor) -> list[Tensor]:
    """Return the same parts in their regions' dtypes."""
    return [part.view(piece.values.dtype) for piece, part in zip(segment.pieces, _cut(segment, slot), strict=True)]


def ring_steps(link: NcclLink, partition: Partition, reduction: Reduction, bad: NonFiniteCount) -> Iterator[Transfer]:
    """See :mod:`.ring`. At a hop, segments of one number go both ways together.

    A segment's merge runs while the next one is transferred: it only has to be over before the segment is sent on.
    """
    rank, world, where = link.rank, link.size, link.where
    right, left = (rank + 1) % world, (rank - 1) % world
    slots = _slots(link, partition.most_segments, partition.segment_bytes)
    reduction.prepare(rank)
    # By number: the segment to be sent next is complete.
    ready: list[Event] = [where.record_event()] * partition.most_segments
    for hop in range(2 * (world - 1)):
        reduces = hop < world - 1
        chunk = (rank - hop - 1) % world
        out, into = partition.chunks[(rank - hop) % world], partition.chunks[chunk]
        if reduces:
            reduction.prepare(chunk)
        for number in range(partition.most_segments):
            transfer = Transfer(after=[ready[number]])
            if number < len(out):
                transfer.sends = [(data, right) for data in out[number].data]
            if number < len(into):
                places = _cut(into[number], slots[number]) if reduces else into[number].data
                transfer.receives = [(place, left) for place in places]
            yield transfer
            ready[number] = transfer.done
            if reduces and number < len(into):
                where.wait_events(transfer.done)
                for piece, part in zip(into[number].pieces, _typed(into[number], slots[number]), strict=True):
                    reduction.merge(piece, part, (1, hop + 1), hop)
                ready[number] = where.record_event()
        if hop >= world - 2:
            where.wait_events(*ready)
            reduction.complete(chunk, bad)


def fold_steps(link: NcclLink, partition: Partition, reduction: Reduction, bad: NonFiniteCount) -> Iterator[Transfer]:
    """See :mod:`.fold`."""
    rank, where = link.rank, link.where
    peers, own = [peer for peer in range(link.size) if peer != rank], partition.chunks[rank]
    slots = iter(_slots(link, len(peers) * len(own), partition.segment_bytes))
    arrived = {peer: [next(slots) for _ in own] for peer in peers}
    for chunk in fold.needed(rank, link.size):
        reduction.prepare(chunk)
    scatter = Transfer(after=[where.record_event()])
    for peer in peers:
        scatter.sends += [(data, peer) for segment in partition.chunks[peer] for data in segment.data]
        scatter.receives += [
            (p, peer) for segment, slot in zip(own, arrived[peer], strict=True) for p in _cut(segment, slot)
        ]
    yield scatter
    where.wait_events(scatter.done)
    for number, segment in enumerate(own):
        parts = [_typed(segment, arrived[peer][number]) for peer in peers]
        for place, piece in enumerate(segment.pieces):
            reduction.fold(piece, [of_peer[place] for of_peer in parts])
    reduction.complete(rank, bad)
    share = Transfer(after=[where.record_event()])
    for peer in peers:
        share.sends += [(data, peer) for segment in own for data in segment.result]
        share.receives += [(data, peer) for segment in partition.chunks[peer] for data in segment.result]
    yield share
    where.wait_events(share.done)
    for peer in peers:
        reduction.complete(peer, bad)


def everywhere_steps(
    link: NcclLink, partition: Partition, reduction: Reduction, bad: NonFiniteCount
) -> Iterator[Transfer]:
    """See :mod:`.everywhere`."""
    rank, where = link.rank, link.where
    ((segment,),) = partition.chunks
    slots = _slots(link, link.size, segment.nbytes)
    reduction.prepare(0)
    for part, data in zip(_cut(segment, slots[rank]), segment.data, strict=True):
        part.copy_(data)
    transfer = Transfer(after=[where.record_event()])
    for peer in range(link.size):
        if peer != rank:
            transfer.sends += [(data, peer) for data in segment.data]
            transfer.receives += [(part, peer) for part in _cut(segment, slots[peer])]
    yield transfer
    where.wait_events(transfer.done)
    parts = [_typed(segment, slot) for slot in slots]
    for place, piece in enumerate(segment.pieces):
        first, *others = (of_rank[place] for of_rank in parts)
        piece.values.copy_(first)
        reduction.fold(piece, others)
    reduction.complete(0, bad)


_OF = {
    "ring": OnDevice(ring, ring_steps),
    "fold": OnDevice(fold, fold_steps),
    "everywhere": OnDevice(everywhere, everywhere_steps),
}


class Mailbox:
    """Memory on the device for the payloads of all other ranks, see :class:`.all_gatherv.Inbox`.

    Args:
        capacity: the most bytes of a payload.
    """

    def __init__(self, link: NcclLink, capacity: int) -> None:
        self.capacity = capacity
        peers = [peer for peer in range(link.size) if peer != link.rank]
        self._places = {peer: link.where.zeros(capacity, torch.uint8) for peer in peers}

    def of(self, capacity: int) -> Mailbox:
        """Return the same memory for smaller payloads, of which only one is received at a time."""
        smaller = copy.copy(self)
        smaller.capacity = capacity
        return smaller

    def run(self, exchange: Exchange, own: Tensor) -> tuple[NonFiniteCount, list[Tensor]]:
        """See :func:`.all_gatherv.run`."""
        link = exchange.transport.link
        assert link
        bad, sizes = _agree(exchange, own.numel(), alike=False)
        if bad.count:
            return bad, []
        check_sizes(exchange, sizes, self.capacity)
        payloads = [self._places[peer][:size] if peer in self._places else own for peer, size in enumerate(sizes)]
        link.run(_counted(exchange, gather_steps(link, own, payloads)), exchange.deadline)
        link.finish(exchange.deadline)
        return bad, payloads


def gather_steps(link: NcclLink, own: Tensor, payloads: list[Tensor]) -> Iterator[Transfer]:
    """Send one payload to every peer, and receive theirs."""
    transfer = Transfer(after=[link.where.record_event()])
    for peer, payload in enumerate(payloads):
        if peer != link.rank:
            transfer.sends.append((own, peer))
            transfer.receives.append((payload, peer))
    yield transfer
    link.where.wait_events(transfer.done)
