"""Which collective a bucket takes: the codec's algebra decides what fits, its size what is best."""

from __future__ import annotations

from collections.abc import Callable

from ..codecs.base import Algebra, Codec
from ..errors import ConfigError
from . import everywhere, fold, ragged, ring
from .base import Collective

_FITTING = {Algebra.SUM: (ring, fold), Algebra.MERGE: (ring, fold), Algebra.FOLD: (fold,)}
_FITTING[Algebra.GATHER] = (ragged,)

#: Below this payload the 2(M-1) latencies of the ring cost more than its bytes.
_SMALL_BYTES = 256 * 1024


def fitting(algebra: Algebra) -> list[str]:
    """Return the names of the collectives that fit an algebra, the usual one first."""
    return [collective.name for collective in _FITTING[algebra]]


def chooser(exchange: str) -> Callable[[Codec, int, int], Collective]:
    """Return a function from (codec, payload bytes, ranks) to a collective.

    Args:
        exchange: "ring", "fold" or "auto".
    """

    def choose(codec: Codec, nbytes: int, world: int) -> Collective:
        fit = _FITTING[codec.algebra]
        if exchange == "auto":
            small = world > 2 and nbytes < _SMALL_BYTES and fold in fit
            return fold if small else fit[0]
        for collective in fit:
            if collective.name == exchange:
                return collective
        names = " or ".join(fitting(codec.algebra))
        raise ConfigError(f'{codec.name} can be exchanged by {names} only, got exchange="{exchange}"')

    return choose


def for_prelude(nbytes: int, world: int) -> Collective:
    """Return the collective of a prelude: one phase while that moves little, else the fold."""
    return everywhere if nbytes * max(1, world - 1) <= _SMALL_BYTES else fold
