"""The ring: reduce-scatter, then all-gather, over neighbours only.

With M ranks there are 2(M-1) hops. At hop h of the first M-1, rank r sends chunk r-h and merges
chunk r-h-1, which then holds h+2 ranks; at the end rank r holds chunk r+1 complete. The other M-1
hops forward complete chunks unchanged. (Chunks are counted modulo M.)

A chunk received at one hop is the chunk sent at the next. So a segment is sent on as soon as it is
merged, while later segments of the same hop are still under way: the hops overlap.

Two hops' worth of receives are posted ahead, and as many sends may be under way. A send thus waits
only for the receiver to have dealt with an earlier hop, never for the hop itself, so no cycle of
ranks can wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .collective import Exchange, Partition, Reduction, Segment, copy_in, received
from .transports.transport import Pending
from .wire import GATHER, REDUCE, FrameBuffer, NonFiniteCount

name = "ring"


@dataclass(frozen=True)
class _Slot:
    """One segment at one hop."""

    hop: int
    chunk: int
    number: int
    segment: Segment


def order(rank: int, world: int) -> list[int]:
    """See :class:`.collective.Collective`."""
    return [(rank + 1 - number) % world for number in range(world)]


def needed(rank: int, world: int) -> list[int]:
    """See :class:`.collective.Collective`."""
    return [(rank - number) % world for number in range(world)]


def merged(rank: int, world: int) -> list[range]:
    """See :class:`.collective.Collective`."""
    return [range(world)]  # one hop's share of every chunk but one


def run(exchange: Exchange, partition: Partition, reduction: Reduction) -> NonFiniteCount:
    """See :class:`.collective.Collective`."""
    world = exchange.transport.size
    if world == 1:
        return exchange.bad
    return _Ring(exchange, partition, reduction).run()


class _Ring:
    def __init__(self, exchange: Exchange, partition: Partition, reduction: Reduction) -> None:
        self._x, self._partition, self._reduction = exchange, partition, reduction
        self._rank, self._world = exchange.transport.rank, exchange.transport.size
        self._window = 2 * partition.most_segments
        room = partition.segment_bytes
        self._out = exchange.pool.take("ring out", self._window, room)
        self._in = exchange.pool.take("ring in", self._window, room)
        self._sends: list[Pending | None] = [None] * self._window
        self._receives: list[Pending | None] = [None] * self._window
        self._sent = self._posted = 0
        self._bad = [exchange.bad] * self._world  # per chunk

    def run(self) -> NonFiniteCount:
        due = list(self._incoming())
        ahead = iter(due)
        for _ in range(self._window):
            self._post(next(ahead, None))
        self._reduction.prepare(self._rank)
        for number, segment in enumerate(self._partition.chunks[self._rank]):
            self._send(_Slot(0, self._rank, number, segment))
        last = 2 * (self._world - 1) - 1
        for index, slot in enumerate(due):
            if slot.number == 0 and self._phase(slot.hop) == REDUCE:
                self._reduction.prepare(slot.chunk)
            self._take(index, slot)
            self._post(next(ahead, None))
            if slot.hop < last:
                self._send(_Slot(slot.hop + 1, slot.chunk, slot.number, slot.segment))
            if slot.hop >= self._world - 2 and slot.number == len(self._partition.chunks[slot.chunk]) - 1:
                self._reduction.complete(slot.chunk, self._bad[slot.chunk])
        for pending in self._sends:
            if pending:
                pending.wait(self._x.deadline)
        return self._bad[self._rank]

    def _incoming(self) -> Iterator[_Slot]:
        """Yield every segment that arrives, in order of arrival."""
        for hop in range(2 * (self._world - 1)):
            chunk = (self._rank - hop - 1) % self._world
            for number, segment in enumerate(self._partition.chunks[chunk]):
                yield _Slot(hop, chunk, number, segment)

    def _phase(self, hop: int) -> int:
        return REDUCE if hop < self._world - 1 else GATHER

    def _post(self, slot: _Slot | None) -> None:
        if slot is None:
            return
        place = self._posted % self._window
        frame = self._in[place].frame(slot.segment.nbytes)
        self._receives[place] = self._x.transport.receive(frame, (self._rank - 1) % self._world)
        self._posted += 1

    def _send(self, slot: _Slot) -> None:
        place = self._sent % self._window
        before = self._sends[place]
        if before:
            before.wait(self._x.deadline)
        address = self._x.address(self._rank, self._phase(slot.hop), slot.hop, slot.chunk, slot.number)
        frame = self._out[place].pack(address, self._bad[slot.chunk], slot.segment.data)
        self._sends[place] = self._x.transport.send(frame, (self._rank + 1) % self._world)
        self._x.bytes_sent += frame.numel()
        self._sent += 1

    def _take(self, index: int, slot: _Slot) -> None:
        """Wait for a segment, check it, and merge it or keep it."""
        place = index % self._window
        pending, frame = self._receives[place], self._in[place]
        assert pending is not None
        pending.wait(self._x.deadline)
        phase = self._phase(slot.hop)
        sender = (self._rank - 1) % self._world
        address = self._x.address(sender, phase, slot.hop, slot.chunk, slot.number)
        bad = frame.check(address, slot.segment.nbytes)
        if slot.number == 0:
            self._x.note("hop", slot.hop)
            self._bad[slot.chunk] = self._x.bad.plus(bad) if phase == REDUCE else bad
        if phase == REDUCE:
            self._merge(slot, frame)
        else:
            copy_in(slot.segment, frame)

    def _merge(self, slot: _Slot, frame: FrameBuffer) -> None:
        for piece in slot.segment.pieces:
            self._reduction.merge(piece, received(piece, frame), (1, slot.hop + 1), slot.hop)
