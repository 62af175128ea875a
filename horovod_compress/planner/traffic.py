"""What a bucket sends: the codec's own arrays, and the collectives that they take."""

from __future__ import annotations

from dataclasses import dataclass

from ..codecs.base import Algebra, Codec
from ..codecs.work import Regions
from ..exchange.choose import chooser, for_prelude
from ..schedule.plan import Bucket

_ROUNDS_FROM = 1 << 20  # a step at which every warm-up is over


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
        filled: which part of a payload's room is used, where payloads are gathered: their arrays say the most only.

    Raises:
        ConfigError: the exchange does not fit the method.
    """
    layout = codec.layout(bucket, ranks)
    preludes = tuple(_prelude(arrays, ranks) for arrays in layout.preludes)
    room = nbytes(layout.regions)
    collective = chooser(exchange)(codec, room, ranks, by_owner=bool(layout.results)).name
    if codec.algebra is Algebra.GATHER:
        return Traffic(preludes, TrafficPart(filled * room, collective))
    results = layout.results if collective == "fold" else {}
    passed_on = nbytes(layout.regions | results)  # as much is sent of the one as of the other
    return Traffic(preludes, TrafficPart((room + passed_on) / 2, collective))


def _prelude(arrays: Regions, ranks: int) -> TrafficPart:
    size = nbytes(arrays)
    return TrafficPart(size, for_prelude(size, ranks).name)


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
