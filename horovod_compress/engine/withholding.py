"""Elements that rounds leave out, over all buckets: which they are, and what waits for them.

:mod:`.bucket.withheld` has the rule. All here is done between two steps, and on every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from .bucket.withheld import Withheld
from .buckets import Buckets
from .context import Context


class _Place(NamedTuple):
    """One tensor: its name, what is withheld in its bucket, and its position in there."""

    name: str
    withheld: Withheld
    position: int


class Withholding:
    """Chooses what rounds leave out, by tensor, and keeps it through changes of the buckets."""

    def __init__(self, context: Context, buckets: Buckets) -> None:
        self._context, self._buckets = context, buckets
        self._unmoved: Mapping[str, Tensor] = {}
        self._masked: Mapping[str, Tensor] = {}

    def zero_groups(self) -> dict[str, int]:
        """Return, by tensor, which zeros stay zeros in coded rounds; see ``Layout.zero_groups``."""
        return {name: group for state in self._buckets for name, group in state.rounds.zero_groups().items()}

    def withhold(self, unmoved: Mapping[str, Tensor]) -> None:
        """Let coded rounds leave out the elements of some tensors for which no rank has had a gradient yet.

        Args:
            unmoved: their indices, rising, by name; equal on every rank. The same object stands for the same elements.
        """
        if not (unmoved or self._unmoved):
            return  # most often, and in every step
        self._unmoved = unmoved
        self._settle([place.withheld.choose(place.position, unmoved.get(place.name)) for place in self._places()])

    def mask(self, masked: Mapping[str, Tensor]) -> None:
        """Let all rounds leave out some elements; see :meth:`withhold`."""
        self._masked = masked
        self._settle([place.withheld.mask(place.position, masked.get(place.name)) for place in self._places()])

    def waiting(self) -> dict[str, Tensor]:
        """Return copies of what waits, by tensor, flat, for those that have elements left out."""
        return {name: withheld.dense(p) for name, withheld, p in self._places() if p in withheld.positions()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Let this wait, and nothing else; also after a change of the buckets."""
        self.mask(self._masked)
        for name, withheld, position in self._places():
            withheld.put(position, saved.get(name))
        self._context.devices.synchronize()

    def scale(self, factor: float, factors: Mapping[str, float] | None = None) -> None:
        """Multiply what waits: by one factor, and by one for each tensor."""
        for name, withheld, position in self._places():
            withheld.scale(position, factor * (factors or {}).get(name, 1.0))

    def _places(self) -> Iterator[_Place]:
        for state in self._buckets:
            state.device.wait_events(state.decoded)  # the last round may still be queued
            withheld = state.memory.withheld
            yield from (_Place(tensor.name, withheld, p) for p, tensor in enumerate(state.bucket.tensors))

    def _settle(self, changes: list[bool]) -> None:
        if any(changes):  # before a thread of another stream looks at it
            self._context.devices.synchronize()
