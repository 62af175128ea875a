"""Which collective a bucket takes: the codec's algebra decides what fits, its size what is best."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import ConfigError
from ..ops.algebra import Algebra
from . import all_gatherv, everywhere, fold, native, ring, torus
from .collective import Collective

_FITTING = {
    Algebra.SUM: (ring.name, fold.name, torus.KIND),
    Algebra.MERGE: (ring.name, fold.name, torus.KIND),
    Algebra.FOLD: (fold.name,),
    Algebra.GATHER: (all_gatherv.name,),
}
_ANY = ("auto", "hierarchical")
_MODULES = {module.name: module for module in (ring, fold, all_gatherv)}

#: What moves in one phase, and the least that is left to the transport. A ring has 2 (M-1) hops one after the other, a
#: fold two phases that make less of the link: below so many bytes for each hop more than two, latencies cost more. With
#: 4 ranks at 1 Gbit/s both take as long at 1 MB.
_SMALL_BYTES = 256 * 1024


def fitting(algebra: Algebra) -> list[str]:
    """Return the names of the collectives that fit an algebra, the usual one first."""
    return list(_FITTING[algebra])


class Method(Protocol):
    """What has to be known of a codec to choose its collective."""

    @property
    def name(self) -> str:
        """What stands in messages."""

    @property
    def algebra(self) -> Algebra:
        """How payloads become one."""


@dataclass(frozen=True)
class Choose:
    """Picks a collective for a bucket.

    Args:
        exchange: "ring", "fold", "torus", "torus:2" with a number of rows, or "auto"; "hierarchical" is that, too,
            among the ranks that it leaves.
        adds: what the transport can add up itself.
    """

    exchange: str
    adds: Collection[torch.dtype] = ()

    def fits(self, codec: Method) -> bool:
        """Return whether payloads of a codec can be exchanged so."""
        return self.exchange in _ANY or self.exchange.partition(":")[0] in _FITTING[codec.algebra]

    def __call__(
        self, codec: Method, nbytes: int, world: int, added: Collection[torch.dtype] = (), by_owner: bool = False
    ) -> Collective:
        """Return the collective of a payload.

        Args:
            added: the dtypes of the payload's regions, where they are plain numbers whose sum any engine can make.
            by_owner: payloads merge better where one rank sees all of them.

        Raises:
            ConfigError: the exchange does not fit the codec.
        """
        fit = _FITTING[codec.algebra]
        if self.exchange in _ANY:
            if by_owner:
                return fold
            short = _SMALL_BYTES * (2 * (world - 1) - 2)
            # The transport's own hops take half as long: they are not in Python.
            if nbytes >= max(_SMALL_BYTES, short // 2) and added and set(added) <= set(self.adds):
                return native
            return fold if nbytes < short and fold.name in fit else _MODULES[fit[0]]
        wanted, _, rows = self.exchange.partition(":")
        if wanted in fit:
            return torus.of(world, int(rows) if rows else None) if wanted == torus.KIND else _MODULES[wanted]
        names = " or ".join(fitting(codec.algebra))
        raise ConfigError(f'{codec.name} can be exchanged by {names} only, got exchange="{self.exchange}"')


def for_prelude(nbytes: int, world: int) -> Collective:
    """Return the collective of a prelude: one phase while that moves little, else the fold."""
    return everywhere if nbytes * max(1, world - 1) <= _SMALL_BYTES else fold
