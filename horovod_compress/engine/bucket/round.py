"""One kind of round of a bucket: everything that is asked of its codec on a gradient's way, in the order of that way.

submit     one gradient, or all at once where a device takes them together
encode     what needs the whole bucket; before it, the preludes
exchange   the payload; parts are encoded and handed on for decoding meanwhile
decode     the result, whole or part by part, over the gradients

A :class:`Round` is that, a :class:`CodecReduction` the codec's part of one exchange, and a :class:`Staging` the copy of
a payload that lies on a device and is exchanged from host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ...codecs.base import Codec, Properties
from ...codecs.dense import Dense
from ...codecs.work import Counts, Part, Work, dtype_of
from ...exchange import all_gatherv, on_device
from ...exchange.collective import Collective, Exchange, FramePiece, Partition, Reduction, chunk_bounds
from ...exchange.device import Deadline, Device, Event
from ...exchange.wire import NonFiniteCount
from ...ops.dispatch import as_tensor
from ...ops.keys import Key

# ---- the codec's part of an exchange -------------------------------------------------------------

#: Takes parts of a bucket.
Take = Callable[[Sequence[Part]], None]
#: Returns a context to encode parts in.
Encoding = Callable[[], contextlib.AbstractContextManager[object]]
#: Cuts so many bytes of a payload, with the copy in host memory, if they are exchanged from there.
Cut = Callable[[int], tuple[Partition, "Staging | None"]]
#: Parts of a bucket by chunk.
Parts = Mapping[int, Sequence[Part]]


def nothing(parts: Sequence[Part]) -> None:
    """Take no notice."""


def present(work: Work, parts: Sequence[Part]) -> Sequence[Part]:
    """Return the parts of gradients that were submitted: sparse ones are not. Of all, that is what was given."""
    if all([grad is not None for grad in work.grads]):  # noqa: C419  a list takes half the time here
        return parts
    return [part for part in parts if work.grads[part.position] is not None]


@dataclass(frozen=True)
class CodecReduction:
    """A codec's part of one exchange, chunk by chunk: it encodes, merges, and hands on what can be decoded.

    It is a :class:`~horovod_compress.exchange.collective.Reduction` with the key of this rank, step and bucket.

    Attributes:
        to_encode: what has to be encoded before each chunk is sent.
        parts: what each chunk makes ready to be decoded.
        encoding: makes the context that parts are encoded in, while earlier ones are on their way.
        ready: called with the parts of the result that can be decoded while the exchange goes on; never, if a value
            of any rank is not finite.
    """

    codec: Codec
    work: Work
    key: Key
    to_encode: Parts = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    encoding: Encoding = contextlib.nullcontext
    ready: Take = nothing

    def prepare(self, chunk: int) -> None:
        if chunk in self.to_encode:
            with self.encoding():
                self.codec.encode(self.work, present(self.work, self.to_encode[chunk]), self.key)

    def merge(self, piece: FramePiece, other: Tensor, weights: tuple[int, int], hop: int) -> None:
        self.codec.combine(self.work, piece, other, weights, self.key.at(hop=hop))

    def fold(self, piece: FramePiece, others: Sequence[Tensor]) -> None:
        self.codec.fold(self.work, piece, others, self.key)

    def complete(self, chunk: int, bad: NonFiniteCount) -> None:
        if chunk in self.parts and not bad.count:
            self.ready(self.parts[chunk])


# ---- payloads of a device that are exchanged from host memory ------------------------------------


class Staging:
    """The arrays of one payload, on the device and on the host, in the same layout.

    The collective works on the copy alone, with the kernels of the CPU, which compute the same bits as the device's. A
    chunk goes to the host before it is sent or reduced for the first time, while earlier ones are on their way; and
    back as soon as it holds consensus bytes, while later ones are. What is copied is the payload, so a method of one
    bit per element stages a thirty-second part of its gradients.

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

    def merge(self, piece: FramePiece, other: Tensor, weights: tuple[int, int], hop: int) -> None:
        self.inner.merge(piece, other, weights, hop)

    def fold(self, piece: FramePiece, others: Sequence[Tensor]) -> None:
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


# ---- rounds --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prelude:
    """An exchange before the payload's."""

    layout: Partition
    collective: Collective
    staging: Staging | None  # where it is exchanged from host memory of its own

    def run(self, exchange: Exchange, reduction: Reduction) -> NonFiniteCount:
        """Exchange the arrays; return the non-finite count over all ranks, which is that of a whole bucket."""
        return self.collective.run(exchange, self.layout, _around(self.staging, reduction, exchange.deadline))


@dataclass(frozen=True)
class Round:
    """What one kind of round needs: some methods have compressed and full-precision rounds."""

    codec: Codec
    properties: Properties
    label: str  # names the kind of round in frames
    work: Work
    collective: Collective
    preludes: tuple[Prelude, ...] = ()
    layout: Partition = field(kw_only=True)
    cut: Cut | None = None  # where the payload's length is known after the preludes: cuts so many bytes of it
    to_encode: Parts = field(default_factory=dict)  # what has to be encoded before each chunk is sent
    parts: Parts = field(default_factory=dict)  # what each chunk makes ready to be decoded
    inbox: all_gatherv.Inbox | on_device.Mailbox | None = None  # where payloads are gathered
    staging: Staging | None = None  # where the payload is exchanged from host memory of its own
    gather: StagedGather | None = None  # likewise, where payloads are gathered
    waits: bool = False  # whether gradients wait for the last one, to be submitted together
    exact: bool = False  # whether gradients are sent as numbers, without what the method does

    # ---- submit ----

    @property
    def divided(self) -> bool:
        """Whether gradients are to be divided before the codec has them, where there is something to divide by."""
        return self.properties.divides == "before" and not self.codec.divides_itself

    @property
    def wire(self) -> torch.dtype | None:
        """What numbers are sent as, or what is right on average where they are rounded; None where they are coded."""
        if isinstance(self.codec, Dense):
            return self.codec.wire_dtype(self.work.bucket)
        return dtype_of(self.work.bucket) if self.exact else None

    def submit(self, positions: Sequence[int], key: Key) -> Counts:
        """Hand gradients to the codec at once; return how many values of each are not finite."""
        return self.codec.submit(self.work, positions, key)

    def submit_all(self, positions: Sequence[int], key: Key) -> Tensor:
        """Do so where a device takes all of a bucket together: its counts are one array."""
        counts = self.codec.submit(self.work, positions, key)
        return counts if isinstance(counts, Tensor) else as_tensor([int(count) for count in counts])

    # ---- encode ----

    def before(self, number: int, key: Key) -> dict[int, int] | None:
        """Fill the arrays of a prelude; return what was counted late, by position."""
        return self.codec.before(number, self.work, key)

    def encode(self, key: Key) -> dict[int, int] | None:
        """Finish the payload, but for the parts that are encoded while earlier ones are on their way."""
        counts = self.codec.before(len(self.preludes), self.work, key)
        if not self.to_encode:
            self.codec.encode(self.work, self.whole(), key)
        return counts

    def whole(self) -> Sequence[Part]:
        """Return all that was submitted."""
        return present(self.work, self._every)

    @cached_property
    def _every(self) -> tuple[Part, ...]:
        """All parts of the bucket."""
        return tuple(Part(position, 0, tensor.count) for position, tensor in enumerate(self.work.bucket.tensors))

    # ---- exchange ----

    def reduction(self, key: Key) -> Reduction:
        """Return what the collective of a prelude needs of the codec.

        The key is one of rank 0, as a reduction that every rank does by itself may not depend on
        the rank; and no chunk of a prelude makes a part of the result ready.
        """
        return CodecReduction(self.codec, self.work, key.at(rank=0))

    def exchange(
        self, exchange: Exchange, key: Key, encoding: Encoding = contextlib.nullcontext, ready: Take = nothing
    ) -> NonFiniteCount:
        """Exchange the payload; return the non-finite count over all ranks.

        Args:
            encoding, ready: see :class:`CodecReduction`.
        """
        if self.inbox is not None:
            bad, self.work.gathered = self._gather(exchange, self.inbox)
            return bad
        reduction = CodecReduction(self.codec, self.work, key, self.to_encode, self.parts, encoding, ready)
        layout, staging = self.cut(self.work.used) if self.cut else (self.layout, self.staging)
        return self.collective.run(exchange, layout, _around(staging, reduction, exchange.deadline))

    def _gather(
        self, exchange: Exchange, inbox: all_gatherv.Inbox | on_device.Mailbox
    ) -> tuple[NonFiniteCount, list[Tensor]]:
        own = self.work.regions["payload"][: self.work.used]
        if isinstance(inbox, on_device.Mailbox):
            return inbox.run(exchange, own)
        if self.gather is None:
            return all_gatherv.run(exchange, own, inbox)
        bad, gathered = all_gatherv.run(exchange, self.gather.fetch(own, exchange.deadline), inbox)
        return bad, self.gather.put(own, gathered)

    # ---- decode ----

    def decode(self, parts: Sequence[Part], key: Key, result_scale: float) -> None:
        """Decode parts of the result, and give them the size of gradients again; sparse gradients are left out."""
        parts = present(self.work, parts)
        self.codec.decode(self.work, parts, key, result_scale)
        for part in parts if self.divided and self.work.divisors else ():
            if (divisor := self.work.divisors.get(part.position)) is not None:
                self.work.grad(part.position)[part.start : part.stop].mul_(divisor[part.start : part.stop])

    def keep(self) -> None:
        """Keep what merging left, of a round whose result is good on every rank."""
        for carry in self.work.carry.values():
            carry.keep()


def _around(staging: Staging | None, reduction: Reduction, deadline: Deadline) -> Reduction:
    return _Staged(staging, reduction, deadline, {}) if staging else reduction
