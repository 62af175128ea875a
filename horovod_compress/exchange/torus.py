"""The two-dimensional torus: rings along rows, then along columns, then along rows again (Wu et al. 2022, Marsit).

R rows of C ranks; rank r C + c is in row r and column c. There are as many chunks as ranks, in C groups of R. Along its
row, a rank reduces all groups but one, and then holds group c + 1 of its row; along its column, it reduces the chunks
of that group, and passes on what is complete; along its row, groups that are complete go round. This sends the bytes of
a ring in 2(C-1) + 2(R-1) hops instead of 2(M-1).

What a rank does follows from its place alone: a list of chunks that arrive, each with what to send on. A segment is
sent on as soon as it is merged, so hops and phases overlap. All receives are posted at the start, and every frame has
memory of its own, so no send ever waits for another rank to proceed, and no ranks can wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ConfigError
from .collective import Exchange, Partition, Reduction, Segment, copy_in, received
from .transports.transport import Pending
from .wire import GATHER, REDUCE, FrameBuffer, NonFiniteCount

#: How it is asked for, with or without a number of rows.
KIND = "torus"


@dataclass(frozen=True)
class Send:
    """A chunk that goes to a neighbour."""

    peer: int
    phase: int
    hop: int
    chunk: int


@dataclass(frozen=True)
class Arrival:
    """A chunk that comes from a neighbour.

    Attributes:
        weights: of how many ranks this rank's own chunk is, and the one that arrives, where they are merged.
        completes: whether the chunk holds consensus bytes then.
        then: what is sent on.
    """

    peer: int
    phase: int
    hop: int
    chunk: int
    weights: tuple[int, int] = (0, 0)
    completes: bool = False
    then: tuple[Send, ...] = ()


@dataclass(frozen=True)
class _GridPlace:
    """A rank's place on the torus, and what follows from it."""

    row: int
    column: int
    rows: int
    columns: int

    def rank(self, row: int, column: int) -> int:
        return row % self.rows * self.columns + column % self.columns

    @property
    def right(self) -> int:
        return self.rank(self.row, self.column + 1)

    @property
    def left(self) -> int:
        return self.rank(self.row, self.column - 1)

    @property
    def below(self) -> int:
        return self.rank(self.row + 1, self.column)

    @property
    def above(self) -> int:
        return self.rank(self.row - 1, self.column)

    def group(self, number: int, complete: int = 0) -> list[int]:
        """Return the chunks of a group, in the order in which a row's columns begin with them, or (1) complete them."""
        return [self.chunk(number, self.row + complete - behind) for behind in range(self.rows)]

    def chunk(self, group: int, part: int) -> int:
        return group % self.columns * self.rows + part % self.rows

    # ---- hops: along rows, along columns, along columns again, along rows again ----

    @property
    def down(self) -> int:
        """The first hop along columns."""
        return self.columns - 1

    @property
    def around(self) -> int:
        """The first hop along columns of what is complete."""
        return self.down + self.rows - 1

    @property
    def back(self) -> int:
        """The first hop along rows of what is complete."""
        return self.around + self.rows - 1

    @lru_cache  # noqa: B019  a process has few places, and the same in every step
    def begin(self) -> tuple[Send, ...]:
        """Return what is sent before anything arrives."""
        if self.columns == 1:
            return (Send(self.below, REDUCE, 0, self.chunk(0, self.row)),)
        return tuple(Send(self.right, REDUCE, 0, chunk) for chunk in self.group(self.column))

    @lru_cache  # noqa: B019
    def arrivals(self) -> tuple[Arrival, ...]:
        """Return what arrives, in order."""
        return (
            *self._along_the_row(),
            *self._down_the_column(),
            *self._around_the_column(),
            *self._back_along_the_row(),
        )

    def _along_the_row(self) -> Iterator[Arrival]:
        for hop in range(self.columns - 1):
            is_last = hop == self.columns - 2
            for chunk in self.group(self.column - hop - 1):
                then = self._begin_column(chunk) if is_last else [Send(self.right, REDUCE, hop + 1, chunk)]
                completes = is_last and self.rows == 1
                yield Arrival(self.left, REDUCE, hop, chunk, (1, hop + 1), completes, tuple(then))

    def _begin_column(self, chunk: int) -> list[Send]:
        if self.rows == 1:
            return self._return(chunk)
        return [Send(self.below, REDUCE, self.down, chunk)] if chunk == self.chunk(self.column + 1, self.row) else []

    def _return(self, chunk: int) -> list[Send]:
        """Return what begins to send a complete chunk along the row."""
        return [Send(self.right, GATHER, self.back, chunk)] if self.columns > 1 else []

    def _down_the_column(self) -> Iterator[Arrival]:
        for hop in range(self.rows - 1):
            chunk, completes = self.chunk(self.column + 1, self.row - hop - 1), hop == self.rows - 2
            weights = (self.columns, (hop + 1) * self.columns)
            if completes:
                then = [Send(self.below, GATHER, self.around, chunk), *self._return(chunk)]
            else:
                then = [Send(self.below, REDUCE, self.down + hop + 1, chunk)]
            yield Arrival(self.above, REDUCE, self.down + hop, chunk, weights, completes, tuple(then))

    def _around_the_column(self) -> Iterator[Arrival]:
        for hop in range(self.rows - 1):
            chunk, then = self.chunk(self.column + 1, self.row - hop), []
            if hop < self.rows - 2:
                then.append(Send(self.below, GATHER, self.around + hop + 1, chunk))
            then += self._return(chunk)
            yield Arrival(self.above, GATHER, self.around + hop, chunk, completes=True, then=tuple(then))

    def _back_along_the_row(self) -> Iterator[Arrival]:
        for hop in range(self.columns - 1):
            for chunk in self.group(self.column - hop, complete=1):
                is_last = hop == self.columns - 2
                then = () if is_last else (Send(self.right, GATHER, self.back + hop + 1, chunk),)
                yield Arrival(self.left, GATHER, self.back + hop, chunk, completes=True, then=then)


@dataclass(frozen=True)
class Torus:
    """A collective, see :class:`.collective.Collective`.

    Args:
        rows: of how many; a divisor of the number of ranks.
    """

    rows: int

    @property
    def name(self) -> str:
        return f"{KIND}:{self.rows}"

    def place(self, rank: int, world: int) -> _GridPlace:
        columns = world // self.rows
        return _GridPlace(*divmod(rank, columns), self.rows, columns)

    def order(self, rank: int, world: int) -> list[int]:
        return [arrival.chunk for arrival in self.place(rank, world).arrivals() if arrival.completes] or [0]

    def needed(self, rank: int, world: int) -> list[int]:
        place = self.place(rank, world)
        merged = (arrival.chunk for arrival in place.arrivals() if arrival.phase == REDUCE)
        return list(dict.fromkeys([*(send.chunk for send in place.begin()), *merged])) or [0]

    def merged(self, rank: int, world: int) -> list[range]:
        place = self.place(rank, world)
        if 1 in (place.rows, place.columns):
            return [range(world)]
        first = place.chunk(place.column + 1, 0)
        return [range(world), range(first, first + place.rows)]

    def run(self, exchange: Exchange, partition: Partition, reduction: Reduction) -> NonFiniteCount:
        if exchange.transport.size == 1:
            return exchange.bad
        place = self.place(exchange.transport.rank, exchange.transport.size)
        return _TorusRun(exchange, partition, reduction, place).run()


def of(world: int, rows: int | None = None) -> Torus:
    """Return the torus of so many ranks; one rank alone is one whatever is asked for.

    Args:
        rows: None for :func:`squarest`.

    Raises:
        ConfigError: so many ranks do not make so many rows.
    """
    rows = squarest(world) if rows is None or world == 1 else rows
    if world % rows:
        raise ConfigError(
            f'exchange="torus:{rows}" asks for {rows} rows of equal length, which {world} ranks cannot form: choose a '
            f'divisor of {world}, or "torus"'
        )
    return Torus(rows)


@lru_cache
def squarest(world: int) -> int:
    """Return the largest number of rows that so many ranks make, and that is not above that of columns."""
    return max(rows for rows in range(1, math.isqrt(world) + 1) if world % rows == 0)


class _TorusRun:
    def __init__(self, exchange: Exchange, partition: Partition, reduction: Reduction, place: _GridPlace) -> None:
        self._x, self._partition, self._reduction = exchange, partition, reduction
        self._begin, self._arrivals = place.begin(), place.arrivals()
        self._bad = [exchange.bad] * exchange.transport.size  # per chunk
        self._sends: list[Pending] = []
        outgoing = [*self._begin, *(send for arrival in self._arrivals for send in arrival.then)]
        self._out = self._frames("torus out", [send.chunk for send in outgoing])
        self._in = self._frames("torus in", [arrival.chunk for arrival in self._arrivals])
        self._prepared: set[int] = set()

    def _frames(self, use: str, chunks: list[int]) -> Iterator[FrameBuffer]:
        number = sum(len(self._partition.chunks[chunk]) for chunk in chunks)
        return iter(self._x.pool.take(use, number, self._partition.segment_bytes))

    def run(self) -> NonFiniteCount:
        posted = [[self._post(arrival, segment) for segment in self._segments(arrival)] for arrival in self._arrivals]
        for send in self._begin:
            self._prepare(send.chunk)
            for number, segment in enumerate(self._segments(send)):
                self._send(send, number, segment)
        for arrival, frames in zip(self._arrivals, posted, strict=True):
            if arrival.phase == REDUCE:
                self._prepare(arrival.chunk)
            for number, (pending, frame) in enumerate(frames):
                pending.wait(self._x.deadline)
                self._take(arrival, number, frame)
            if arrival.completes:
                self._reduction.complete(arrival.chunk, self._bad[arrival.chunk])
        for pending in self._sends:
            pending.wait(self._x.deadline)
        return self._bad[0]

    def _segments(self, what: Send | Arrival) -> tuple[Segment, ...]:
        return self._partition.chunks[what.chunk]

    def _prepare(self, chunk: int) -> None:
        if chunk not in self._prepared:
            self._prepared.add(chunk)
            self._reduction.prepare(chunk)

    def _post(self, arrival: Arrival, segment: Segment) -> tuple[Pending, FrameBuffer]:
        frame = next(self._in)
        return self._x.transport.receive(frame.frame(segment.nbytes), arrival.peer), frame

    def _send(self, send: Send, number: int, segment: Segment) -> None:
        address = self._x.address(self._x.transport.rank, send.phase, send.hop, send.chunk, number)
        frame = next(self._out).pack(address, self._bad[send.chunk], segment.data)
        self._sends.append(self._x.transport.send(frame, send.peer))
        self._x.bytes_sent += frame.numel()

    def _take(self, arrival: Arrival, number: int, frame: FrameBuffer) -> None:
        """Check a segment that has come, merge it or keep it, and send it on."""
        segment = self._segments(arrival)[number]
        address = self._x.address(arrival.peer, arrival.phase, arrival.hop, arrival.chunk, number)
        bad = frame.check(address, segment.nbytes)
        if number == 0:
            self._x.note("hop", arrival.hop)
            self._bad[arrival.chunk] = self._bad[arrival.chunk].plus(bad) if arrival.phase == REDUCE else bad
        if arrival.phase == REDUCE:
            for piece in segment.pieces:
                self._reduction.merge(piece, received(piece, frame), arrival.weights, arrival.hop)
        else:
            copy_in(segment, frame)
        for send in arrival.then:
            self._send(send, number, segment)
