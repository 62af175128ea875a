"""The memory of one bucket, and copies of payloads in host memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...codecs.base import Algebra, Codec, variants_of
from ...codecs.layout import Layout
from ...codecs.work import Regions
from ...exchange import all_gatherv, on_device
from ...exchange.base import Reduction
from ...exchange.choose import Choose
from ...exchange.deadline import Deadline
from ...exchange.device import Device, Event
from ...exchange.layout import Piece, chunk_bounds
from ...exchange.transports.link import NcclLink
from ...exchange.wire import NonFiniteCount
from ...schedule.plan import Bucket
from .withheld import Withheld

# ---- staging -----------------------------------------------------------------------------------
#
# Payloads on a device that are exchanged from host memory: a copy of each, in the same layout.
#
# The collective works on the copy alone, with the kernels of the CPU, which give the bits of the device's. A
# chunk goes to the host before it is sent or reduced for the first time, while earlier ones are on their way;
# and back as soon as it holds consensus bytes, while later ones are. What is copied is the payload, so a method
# of one bit per element stages a thirty-second part of its gradients.


class Staging:
    """The arrays of one payload, on the device and on the host.

    Args:
        arrays: the payload's regions on the device.
        host: arrays of the same names, types and lengths in host memory.
        order: the chunks in the order in which they are needed on the host.
        records: see :class:`horovod_compress.codecs.layout.Layout`.
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


# ---- memory ------------------------------------------------------------------------------------
#
# The memory of one bucket: what is kept from step to step, and what its kinds of rounds share.


@dataclass(frozen=True)
class Site:
    """Where a bucket lives, and how it is exchanged from there.

    Attributes:
        staged: whether payloads are exchanged from copies in host memory.
        link: or from where they are.
    """

    rank: int
    world: int
    choose: Choose
    device: Device
    staged: bool
    link: NcclLink | None


class Memory:
    """The arrays of one bucket.

    A bucket has one round at a time, so the kinds of rounds share what is not kept between them.
    """

    def __init__(self, bucket: Bucket, codec: Codec, site: Site) -> None:
        self.bucket, self.site = bucket, site
        variants, own = variants_of(codec), codec.layout(bucket, site.world)
        #: This step's gradients, flat, one per tensor.
        self.grads: list[Tensor | None] = [None] * len(bucket.tensors)
        #: What is kept from step to step, for every element and for the bucket as a whole.
        self.state = self.allocate({n: (d, bucket.padded) for n, d in own.state.items()}, _folded(variants))
        self.tables = self.allocate(own.tables)
        #: By position, the optimizer's momentum buffers; see Work.momenta.
        self.momenta: dict[int, list[Tensor]] = {}
        #: By position, what gradients are divided by before they are encoded; see Properties.divides.
        self.divisors: dict[int, Tensor] = {}
        self.withheld = Withheld(bucket, site.device.where)
        self.payload = self.payload_for(variants)
        scratch = max((nbytes_of(self.layout(codec).scratch) for codec in variants), default=0)
        self.scratch = site.device.zeros(scratch, torch.uint8)
        self.inbox, self.gather = self._inbox_for(variants)

    def layout(self, codec: Codec) -> Layout:
        """Return what a kind of round needs of this bucket."""
        return codec.layout(self.bucket, self.site.world)

    def allocate(self, regions: Regions, on_host: Collection[str] = ()) -> dict[str, Tensor]:
        """Return arrays on the device, but for some that payloads are merged with where they are exchanged."""
        staged = on_host if self.site.staged else ()
        return {
            name: torch.zeros(count, dtype=dtype) if name in staged else self.site.device.zeros(count, dtype)
            for name, (dtype, count) in regions.items()
        }

    def span(self, position: int) -> slice:
        """Return where the elements of one tensor are in what is kept."""
        start = self.bucket.offsets[position]
        return slice(start, start + self.bucket.tensors[position].count)

    def payload_for(self, codecs: Sequence[Codec]) -> Payload:
        """Return memory for the largest payload; the rounds of a method share it."""
        nbytes = max(self._nbytes_of(codec) for codec in codecs)
        reduced = [self._nbytes_of(codec) for codec in codecs if codec.algebra is not Algebra.GATHER]
        host = self.site.device.host_zeros(max(reduced, default=0), torch.uint8) if self.site.staged else None
        return Payload(self.site.device.zeros(nbytes, torch.uint8), host)

    def payload_that_holds(self, codec: Codec) -> Payload:
        """Return the memory of payloads, or more where that of a further kind of round does not fit."""
        return self.payload if self.payload.holds(self._nbytes_of(codec)) else self.payload_for((codec,))

    def _nbytes_of(self, codec: Codec) -> int:
        """Return what a payload and its results take."""
        layout = self.layout(codec)
        return nbytes_of(layout.regions) + nbytes_of(layout.results)

    def _inbox_for(
        self, variants: Sequence[Codec]
    ) -> tuple[all_gatherv.Inbox | on_device.Mailbox | None, StagedGather | None]:
        """Return memory for the largest payloads that are gathered."""
        regions = [self.layout(codec).regions for codec in variants if codec.algebra is Algebra.GATHER]
        sizes = [sum(dtype.itemsize * count for dtype, count in arrays.values()) for arrays in regions]
        if not sizes:
            return None, None
        site = self.site
        if site.link:
            return on_device.Mailbox(site.link, max(sizes)), None
        inbox = all_gatherv.Inbox(site.rank, site.world, max(sizes))
        staged = StagedGather(site.device, site.rank, site.world, max(sizes)) if site.staged else None
        return inbox, staged


@dataclass(frozen=True)
class Payload:
    """Memory for payloads, and that of their copies in host memory, where there are any."""

    memory: Tensor
    host: Tensor | None

    def holds(self, nbytes: int) -> bool:
        """Return whether a payload fits, and its copy."""
        return nbytes <= self.memory.numel() and (self.host is None or nbytes <= self.host.numel())


def carve(memory: Tensor, regions: Regions) -> dict[str, Tensor]:
    """Return typed arrays one behind the other in ``memory``."""
    arrays, at = {}, 0
    for name, (dtype, count) in regions.items():
        nbytes = dtype.itemsize * count
        arrays[name] = memory[at : at + nbytes].view(dtype)
        at += _padded(nbytes)
    return arrays


def nbytes_of(regions: Regions) -> int:
    """Return the memory that :func:`carve` needs."""
    return sum(_padded(dtype.itemsize * count) for dtype, count in regions.values())


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _folded(variants: Sequence[Codec]) -> set[str]:
    """Return the state that payloads are merged with."""
    return {name for variant in variants for name in variant.properties().folded}
