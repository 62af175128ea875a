"""Payloads on a device that are exchanged from host memory: a copy of each, in the same layout.

The collective works on the copy alone, with the kernels of the CPU, which give the bits of the device's. A
chunk goes to the host before it is sent or reduced for the first time, while earlier ones are on their way;
and back as soon as it holds consensus bytes, while later ones are. What is copied is the payload, so a method
of one bit per element stages a thirty-second part of its gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...exchange.base import Reduction
from ...exchange.deadline import Deadline
from ...exchange.device import Device, Event
from ...exchange.layout import Piece, chunk_bounds
from ...exchange.wire import NonFiniteCount


class Staging:
    """The arrays of one payload, on the device and on the host.

    Args:
        arrays: the payload's regions on the device.
        host: arrays of the same names, types and lengths in host memory.
        order: the chunks in the order in which they are needed on the host.
        records: see :class:`horovod_compress.codecs.work.Layout`.
        results: by region, the arrays of what owners pass on, on the device and on the host, where that is not the
            region itself.
    """

    def __init__(
        self,
        device: Device,
        arrays: Mapping[str, Tensor],
        host: Mapping[str, Tensor],
        order: Sequence[int],
        records: Mapping[str, int],
        results: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.device, self.host, self._order = device, host, list(order)
        pairs = {name: (array, host[name]) for name, array in arrays.items()}
        bounds = {
            chunk: {n: chunk_bounds(a.numel(), chunk, len(order), records.get(n, 1)) for n, a in arrays.items()}
            for chunk in order
        }
        self._parts = {chunk: _cut(pairs, pairs, bounds[chunk]) for chunk in order}
        self._results = {chunk: _cut(pairs, pairs | dict(results or {}), bounds[chunk]) for chunk in order}

    def around(self, reduction: Reduction, deadline: Deadline) -> Reduction:
        """Return a reduction of one exchange that does what the given one does, and copies."""
        return _Staged(self, reduction, deadline, {})

    def next(self, chunk: int) -> int | None:
        """Return the chunk that is needed after this one, if there is one."""
        place = self._order.index(chunk) + 1
        return self._order[place] if place < len(self._order) else None

    def fetch(self, chunk: int) -> Event:
        """Queue the copy of a chunk to the host; return the event to wait for."""
        for array, host in self._parts[chunk]:
            self.device.copy(host, array)
        return self.device.record_event()

    def put(self, chunk: int) -> None:
        """Queue the copy of a chunk's result back to the device."""
        for array, host in self._results[chunk]:
            self.device.copy(array, host)


def _cut(
    arrays: Mapping[str, tuple[Tensor, Tensor]],
    carriers: Mapping[str, tuple[Tensor, Tensor]],
    bounds: Mapping[str, tuple[int, int]],
) -> list[tuple[Tensor, Tensor]]:
    """Return what lies within bounds, which are those of the arrays, in the pairs that carry their elements."""
    found = []
    for name, (start, stop) in bounds.items():
        if start < stop:
            ends = [index * carriers[name][0].numel() // arrays[name][0].numel() for index in (start, stop)]
            found.append((carriers[name][0][slice(*ends)], carriers[name][1][slice(*ends)]))
    return found


@dataclass(frozen=True)
class _Staged:
    """A reduction of one exchange, with the copies that it needs."""

    staging: Staging
    inner: Reduction
    deadline: Deadline
    fetched: dict[int, Event]

    def prepare(self, chunk: int) -> None:
        self._fetch(chunk)
        following = self.staging.next(chunk)
        if following is not None:
            self._fetch(following)  # it is encoded and copied while this chunk is on its way
        self.staging.device.wait(self.fetched[chunk], self.deadline)

    def _fetch(self, chunk: int) -> None:
        if chunk not in self.fetched:
            self.inner.prepare(chunk)
            self.fetched[chunk] = self.staging.fetch(chunk)

    def merge(self, piece: Piece, other: Tensor, weights: tuple[int, int], hop: int) -> None:
        self.inner.merge(piece, other, weights, hop)

    def fold(self, piece: Piece, others: Sequence[Tensor]) -> None:
        self.inner.fold(piece, others)

    def complete(self, chunk: int, bad: NonFiniteCount) -> None:
        if not bad.count:  # else it is not read
            self.staging.put(chunk)
        self.inner.complete(chunk, bad)


class StagedGather:
    """The host's copies of this rank's payload and the device's copies of all ranks', where payloads are gathered.

    Args:
        capacity: the most bytes of a payload.
    """

    def __init__(self, device: Device, rank: int, world: int, capacity: int) -> None:
        self._device, self._rank = device, rank
        self._own = device.host_zeros(capacity, torch.uint8)
        self._theirs = {peer: device.zeros(capacity, torch.uint8) for peer in range(world) if peer != rank}

    def fetch(self, own: Tensor, deadline: Deadline) -> Tensor:
        """Return this rank's payload on the host."""
        host = self._own[: own.numel()]
        self._device.copy(host, own)
        self._device.wait(self._device.record_event(), deadline)
        return host

    def put(self, own: Tensor, gathered: Sequence[Tensor]) -> list[Tensor]:
        """Queue the copies of the other ranks' payloads to the device, and return all payloads there."""
        found = []
        for rank, payload in enumerate(gathered):
            place = own if rank == self._rank else self._theirs[rank][: payload.numel()]
            if rank != self._rank:
                self._device.copy(place, payload)
            found.append(place)
        return found
