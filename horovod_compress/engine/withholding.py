"""Elements that rounds leave out, over all buckets: :mod:`.bucket.withheld` has the rule for one of them.

Between two steps, and on every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..codecs.work import MOMENTA, work_dtype
from .bucket.memory import Memory
from .bucket.pruned import PrunedBucket
from .bucket.shares import HostBucket, owned
from .bucket.withheld import Withheld
from .buckets import Buckets
from .context import Context


class _Place(NamedTuple):
    """One tensor: its name, the memory of its bucket, its position in there, and the part that rounds see."""

    name: str
    memory: Memory
    position: int
    part: HostBucket | PrunedBucket | None

    @property
    def withheld(self) -> Withheld:
        return self.memory.withheld

    def withhold(self, unmoved: Mapping[str, Tensor]) -> bool:
        """Choose the elements for which gradients wait, by name; return whether they are others than before."""
        index = unmoved.get(self.name)
        index = self.part.own_indices(self.position, index) if self.part else index
        changed = self.withheld.choose(self.position, index)
        if changed and index is not None:
            self.withheld.add(self.position, index, self._emptied(index))
        return changed

    def mask(self, kinds: Mapping[str, Tensor]) -> bool:
        """Choose what is masked: nothing is kept for it."""
        own = self.part.own(self.position) if self.part else slice(None)
        changed = self.withheld.mask(self.position, kinds.get(self.name), own)
        if changed and (masked := self.withheld.masked(self.position)) is not None:
            self._emptied(masked)
        return changed

    def _emptied(self, index: Tensor) -> Tensor:
        """Return what a method would still send of some elements, in units of gradients, and empty all that it keeps.

        There is something where elements have been coded until now, and were given what their group rounded off.
        """
        memory, position = self.memory, self.position
        found = torch.zeros(index.numel(), dtype=work_dtype(memory.bucket), device=index.device)
        for kind, kept in memory.state.items():
            mine, where = kept.data[memory.span(position)], index.to(kept.device)  # data: see Withheld.keep
            if kind not in MOMENTA:
                found += mine[where].to(found) * (memory.site.world if kind in memory.folded else 1)
            mine.index_fill_(0, where, 0)
        divisor = memory.divisors.get(position)
        return found if divisor is None else found * divisor[index]

    def waiting(self) -> Tensor:
        """Return a copy of what waits."""
        values = self.withheld.dense(self.position)
        return self.part.spread(self.position, values) if isinstance(self.part, PrunedBucket) else values

    def put(self, saved: Mapping[str, Tensor]) -> None:
        """Let this wait, of what does by name."""
        values, pruned = saved.get(self.name), self.part if isinstance(self.part, PrunedBucket) else None
        self.withheld.put(self.position, None if values is None else owned(pruned, self.position, values))


class Withholding:
    """Chooses what rounds leave out, by tensor, and keeps it through changes of the buckets.

    :mod:`.bucket.withheld` has the rule.
    """

    def __init__(self, context: Context, buckets: Buckets) -> None:
        self._context, self._buckets = context, buckets
        self._unmoved: Mapping[str, Tensor] = {}
        self._kinds: Mapping[str, Tensor] = {}

    def zero_groups(self) -> dict[str, int]:
        """Return, by tensor, which zeros stay zeros in coded rounds; see ``Layout.zero_groups``.

        Groups of what is left of pruned tensors are not theirs.
        """
        found = {name: group for state in self._buckets for name, group in state.rounds.zero_groups().items()}
        return {name: 0 if group > 1 and name in self._buckets.rest else group for name, group in found.items()}

    def withhold(self, unmoved: Mapping[str, Tensor]) -> None:
        """Let coded rounds leave out the elements of some tensors for which no rank has had a gradient yet.

        What was kept for them waits from now on: the next exact round sends it.

        Args:
            unmoved: their indices, rising, by name; equal on every rank. The same object stands for the same elements.
        """
        if not (unmoved or self._unmoved):
            return  # most often, and in every step
        self._unmoved = unmoved
        self._settle([place.withhold(unmoved) for place in self._places()])

    def mask(self, kinds: Mapping[str, Tensor]) -> None:
        """Let all rounds leave out masked elements; see :meth:`withhold`.

        Args:
            kinds: by name, what each element is, see :data:`.bucket.withheld.MASKED`.
        """
        self._kinds = kinds
        self._settle([place.mask(kinds) for place in self._places()])

    def waiting(self) -> dict[str, Tensor]:
        """Return copies of what waits, by tensor, flat, for those that have elements left out."""
        return {place.name: place.waiting() for place in self._places() if place.position in place.withheld.positions()}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Let this wait, and nothing else; also after a change of the buckets."""
        self.mask(self._kinds)
        for place in self._places():
            place.put(saved)
        self._context.devices.synchronize()

    def scale(self, factor: float, factors: Mapping[str, float] | None = None) -> None:
        """Multiply what waits: by one factor, and by one for each tensor."""
        for place in self._places():
            place.withheld.scale(place.position, factor * (factors or {}).get(place.name, 1.0))

    def _places(self) -> Iterator[_Place]:
        for state in self._buckets:
            state.device.wait_events(state.decoded)  # the last round may still be queued
            names = [tensor.name for tensor in state.bucket.tensors]
            yield from (_Place(name, state.memory, position, state.part) for position, name in enumerate(names))

    def _settle(self, changes: list[bool]) -> None:
        if any(changes):  # before a thread of another stream looks at it
            self._context.devices.synchronize()
