"""What an exchange takes on a network: seconds from bytes, ranks, link and processor, one formula for each collective.

It is the alpha-beta model (Hockney 1994; Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005, for collectives) with
the cuts of ``exchange.collective``. M ranks send a payload of P bytes over links of ``rate`` bytes per second:

    chunk = P / M, in s segments of chunk / s bytes;  b = segment / rate,  c = processor's seconds for a segment
    ring        2 (M-1) hops;                             bytes sent 2 (M-1)/M P
    fold        2 phases of (M-1) s messages;             bytes sent 2 (M-1)/M P
    torus       2 (C-1) + 2 (R-1) hops, R rows of C;      bytes sent 2 (M-1)/M P
    gather      lengths, then 1 phase of M-1 messages;    bytes sent (M-1) P
    everywhere  1 phase of M-1 messages;                  bytes sent (M-1) P

With ``exchange="hierarchical"`` the ranks of a host share its link, and each sends its share of a payload to the hosts.

A hop's segments follow each other: it takes as long as the link or the processor is busy with all of them, and at
least as long as one needs to come through, b + latency + c. A phase has all messages under way at once, so only the
last one's latency counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...codecs.base import Algebra, Codec
from ...codecs.work import Regions
from ...exchange.choose import Choose, for_prelude
from ...exchange.collective import MAX_SEGMENTS, MIN_SEGMENT_BYTES
from ...exchange.torus import squarest
from ...exchange.wire import HEADER_BYTES
from ...schedule.plan import Bucket

#: What TCP over Ethernet leaves of a link's rate: 1448 bytes of data in a frame that occupies 1538.
GOODPUT = 1448 / 1538
#: Processor's seconds that Gloo and the exchange thread need to send and receive a message, beyond its bytes: an
#: estimate. ``hvd-compress plan --measure`` needs none.
MESSAGE_SECONDS = 60e-6
#: Bytes that say how long a gathered payload is.
LENGTH_BYTES = 8
_ROUNDS_FROM = 1 << 20  # a step at which every warm-up is over


@dataclass(frozen=True)
class Link:
    """The network connection of one rank.

    Attributes:
        rate: bytes per second in each direction, as the link is sold.
        latency: seconds from the first byte that leaves to the first that arrives.
        message: processor's seconds for a message, beyond its bytes.
    """

    rate: float
    latency: float
    message: float = MESSAGE_SECONDS

    def seconds(self, nbytes: float) -> float:
        """Return how long the link is busy with a message."""
        return (nbytes + HEADER_BYTES) / (GOODPUT * self.rate)


@dataclass(frozen=True)
class PayloadCost:
    """What is exchanged, and what the processor does with it.

    Attributes:
        nbytes: of one rank's payload.
        merge: processor's seconds to reduce one further payload into this rank's own.
        copy: processor's seconds for each byte that is sent and received: checksums and copies.
    """

    nbytes: float
    merge: float = 0.0
    copy: float = 0.0


@dataclass(frozen=True)
class Cost:
    """What an exchange takes on one rank.

    Attributes:
        seconds: from its begin to its end.
        sent: bytes over this rank's link, without headers.
        messages: that this rank sends.
    """

    seconds: float
    sent: float = 0.0
    messages: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.sent + other.sent, self.messages + other.messages)


Formula = Callable[[PayloadCost, int, Link], Cost]

NOTHING = Cost(0.0)


def segments_of(chunk: float) -> int:
    """Return how many segments a chunk of that many bytes has."""
    return max(1, math.ceil(chunk / max(MIN_SEGMENT_BYTES, chunk / MAX_SEGMENTS)))


def _segments(payload: PayloadCost, ranks: int, link: Link) -> tuple[int, float, float, float]:
    """Return how many segments a chunk has, and the seconds of each: on the link, when handled, and when merged too."""
    chunk = payload.nbytes / ranks
    number = segments_of(chunk)
    handled = link.message + payload.copy * chunk / number
    return number, link.seconds(chunk / number), handled, handled + payload.merge / ranks / number


def phase(messages: int, link_busy: float, processor_busy: float, latency: float) -> float:
    """Return the seconds of messages that are all under way at once, each keeping link and processor busy so long."""
    if not messages:
        return 0.0
    slow, fast = max(link_busy, processor_busy), min(link_busy, processor_busy)
    return messages * slow + fast + latency


def ring(payload: PayloadCost, ranks: int, link: Link) -> Cost:
    """Reduce-scatter and all-gather over neighbours; see ``exchange.ring``."""
    if ranks == 1:
        return NOTHING
    chunk, hops = payload.nbytes / ranks, ranks - 1
    number, busy, handled, merged = _segments(payload, ranks, link)

    def hop(processor: float) -> float:
        return max(number * busy, number * processor, busy + link.latency + processor)

    through = link.latency + handled if number > 1 else 0.0  # of the last segment, after the others
    seconds = hops * (hop(merged) + hop(handled)) + through
    return Cost(seconds, 2 * hops * chunk, 2 * hops * number)


def fold(payload: PayloadCost, ranks: int, link: Link) -> Cost:
    """Chunks to their owners, results to everyone; see ``exchange.fold``."""
    if ranks == 1:
        return NOTHING
    chunk, peers = payload.nbytes / ranks, ranks - 1
    number, busy, handled, merged = _segments(payload, ranks, link)
    seconds = sum(phase(peers * number, busy, processor, link.latency) for processor in (merged, handled))
    return Cost(seconds, 2 * peers * chunk, 2 * peers * number)


def torus(payload: PayloadCost, ranks: int, link: Link, rows: int | None = None) -> Cost:
    """Rings along rows, and along columns for the share that a rank has then; see ``exchange.torus``."""
    rows = rows or squarest(ranks)
    columns = ranks // rows
    share = PayloadCost(payload.nbytes / columns, payload.merge / columns, payload.copy)
    return ring(payload, columns, link) + ring(share, rows, link)


def everywhere(payload: PayloadCost, ranks: int, link: Link) -> Cost:
    """All of it to every other rank, reduced on each; see ``exchange.everywhere``."""
    peers = ranks - 1
    processor = link.message + payload.copy * payload.nbytes + payload.merge
    seconds = phase(peers, link.seconds(payload.nbytes), processor, link.latency)
    return Cost(seconds, peers * payload.nbytes, peers)


def gather(payload: PayloadCost, ranks: int, link: Link) -> Cost:
    """Payloads of any length to every other rank, their lengths first; see ``exchange.all_gatherv``."""
    lengths = everywhere(PayloadCost(LENGTH_BYTES, 0.0, payload.copy), ranks, link)
    return lengths + everywhere(PayloadCost(payload.nbytes, 0.0, payload.copy), ranks, link)


#: By the names of the collectives in ``exchange``.
FORMULAS: dict[str, Formula] = {"ring": ring, "fold": fold, "torus": torus, "everywhere": everywhere, "gather": gather}


def formula(collective: str) -> Formula:
    """Return the formula of a collective by its name; that of a torus has its number of rows."""
    kind, _, rows = collective.partition(":")
    return partial(torus, rows=int(rows)) if rows else FORMULAS[kind]


# ---- ranks that share hosts ----

#: How often the ranks of a host meet for a bucket: see ``engine.bucket.shares``.
_MEETINGS = 3


def within_host(gradients: float, per_host: int, local: Link) -> Cost:
    """Return what the ranks of a host take to average a bucket, and to copy its results, in memory that they share.

    Args:
        gradients: bytes of one rank's.
        local: its rate is that of copies in memory; its messages are those of the meetings.
    """
    meeting = everywhere(PayloadCost(0.0), per_host, local)
    return Cost(2 * gradients / local.rate + _MEETINGS * meeting.seconds)


def crowded(link: Link, per_host: int) -> Link:
    """Return what each rank of a host has of its host's one link, when all send at once."""
    return Link(link.rate / per_host, link.latency, link.message)


# ---- what is exchanged ----


@dataclass(frozen=True)
class TrafficPart:
    """One exchange of a bucket.

    Attributes:
        nbytes: of one rank's arrays.
        collective: the name of what it takes.
    """

    nbytes: float
    collective: str


@dataclass(frozen=True)
class Traffic:
    """All exchanges of a bucket in one step: preludes, then the payload."""

    preludes: tuple[TrafficPart, ...]
    payload: TrafficPart


def traffic(codec: Codec, bucket: Bucket, ranks: int, exchange: str = "auto", filled: float = 1.0) -> Traffic:
    """Return what a bucket sends in one round.

    Args:
        codec: of that round, one of ``variants_of(method)``.
        exchange: as the option of that name.
        filled: which part of a payload's room is used, where its arrays say the most only.

    Raises:
        ConfigError: the exchange does not fit the method.
    """
    layout = codec.layout(bucket, ranks)
    sizes = [nbytes(arrays) for arrays in layout.preludes]
    preludes = tuple(TrafficPart(size, for_prelude(size, ranks).name) for size in sizes)
    room = nbytes(layout.regions)
    collective = Choose(exchange)(codec, room, ranks, by_owner=bool(layout.results)).name
    if codec.algebra is Algebra.GATHER or layout.varies:
        return Traffic(preludes, TrafficPart(filled * room, collective))
    results = layout.results if collective == "fold" else {}
    passed_on = nbytes(layout.regions | results)  # as much is sent of the one as of the other
    return Traffic(preludes, TrafficPart((room + passed_on) / 2, collective))


def nbytes(arrays: Regions) -> int:
    """Return the bytes of some arrays."""
    return sum(dtype.itemsize * count for dtype, count in arrays.values())


def rounds(codec: Codec) -> list[tuple[Codec, float]]:
    """Return the kinds of rounds of a method once its warm-up is over, with their shares; the usual one first."""
    period = max(1, codec.properties().full_precision_every)
    shares: dict[Codec, float] = {}
    for step in range(period):
        one = codec.for_step(_ROUNDS_FROM + step)
        shares[one] = shares.get(one, 0.0) + 1 / period
    return sorted(shares.items(), key=lambda pair: -pair[1])
