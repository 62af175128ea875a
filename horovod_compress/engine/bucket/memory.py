"""The memory of one bucket, and the rounds that are made of it, with what each chunk of a payload needs and frees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...codecs.base import Algebra, Codec, variants_of
from ...codecs.dense import Dense
from ...codecs.work import Cutting, Layout, Part, Regions, Work, carries
from ...exchange import all_gatherv, everywhere, on_device
from ...exchange.choose import Choose, for_prelude
from ...exchange.collective import Collective, Partition, chunk_bounds
from ...exchange.device import Device
from ...exchange.transports.transport import NcclLink
from ...schedule.plan import Bucket
from .round import Prelude, Round, StagedGather, Staging
from .withheld import Withheld


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

    Args:
        whole: the bucket that this one is this rank's share of, where ranks of a host share it.
    """

    def __init__(self, bucket: Bucket, codec: Codec, site: Site, whole: Bucket | None = None) -> None:
        self.bucket, self.site, self.whole = bucket, site, whole or bucket
        variants, own = variants_of(codec), codec.layout(bucket, site.world)
        #: This step's gradients, contiguous, one per tensor.
        self.grads: list[Tensor | None] = [None] * len(bucket.tensors)
        #: What is kept from step to step, for every element and for the bucket as a whole.
        self.folded = {name for variant in variants for name in variant.folded}  # which payloads are merged with
        self.state = self.allocate({n: (d, bucket.padded) for n, d in own.state.items()}, self.folded)
        self.tables = self.allocate(own.tables)
        #: By position, the optimizer's momentum buffers; see Work.momenta.
        self.momenta: dict[int, list[Tensor]] = {}
        #: By position, what gradients are divided by before they are encoded; see Properties.divides.
        self.divisors: dict[int, Tensor] = {}
        self.linear: set[int] = set()  # see Work.linear
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
            name: torch.zeros(count, dtype=dtype, device="cpu")
            if name in staged
            else self.site.device.zeros(count, dtype)
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
        nbytes, (memory, host) = self._nbytes_of(codec), self.payload
        fits = nbytes <= memory.numel() and (host is None or nbytes <= host.numel())
        return self.payload if fits else self.payload_for((codec,))

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


class Payload(NamedTuple):
    """Memory for payloads, and that of their copies in host memory, where there are any."""

    memory: Tensor
    host: Tensor | None


def carve(memory: Tensor, regions: Regions) -> dict[str, Tensor]:
    """Return typed arrays one after the other in ``memory``."""
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


# ---- rounds, made of the memory ------------------------------------------------------------------

Arrays = dict[str, Tensor]


def make_round(
    memory: Memory, codec: Codec, label: str, payload: Payload, kept: Mapping[str, Tensor], *, exact: bool
) -> Round:
    """Return a kind of round.

    Args:
        label: names it in frames.
        kept: what it works with of the bucket's state.
        exact: see :class:`Round`.
    """
    layout, site = memory.layout(codec), memory.site
    shared = [memory.allocate(arrays) for arrays in layout.preludes]
    regions = carve(payload.memory, layout.regions)
    work = Work(
        memory.bucket,
        site.world,
        memory.grads,
        dict(kept),
        memory.tables,
        regions,
        {name: array for each in shared for name, array in each.items()},
        memory.allocate(layout.local, codec.folded) | carve(memory.scratch, layout.scratch),
        momenta=memory.momenta,
        divisors=memory.divisors,
        withheld=memory.withheld.index,
        linear=memory.linear,
    )
    codec.prepare(work)
    preludes = tuple(_prelude(memory, each) for each in shared)
    added = {array.dtype for array in regions.values()} if isinstance(codec, Dense) else set()
    nbytes, records = sum(array.nbytes for array in regions.values()), layout.records
    collective = site.choose(codec, nbytes, site.world, added, bool(layout.results))
    waits, properties = codec.batched and site.device.is_accelerator, codec.properties()
    if codec.algebra is Algebra.GATHER:
        assert memory.inbox is not None
        chunks, inbox = Partition.of(regions, site.world, records), memory.inbox.of(nbytes)
        return Round(
            *(codec, properties, label, work, collective, preludes),
            layout=chunks, inbox=inbox, gather=memory.gather, waits=waits, exact=exact,
        )  # fmt: skip
    collective = on_device.of(collective) if site.link else collective
    _make_carry(memory, layout, work, collective)
    order = collective.needed(site.rank, site.world)
    results = layout.results if collective.name == "fold" and site.world > 1 else {}
    behind = nbytes_of(layout.regions)
    work.results = carve(payload.memory[behind:], results)
    on_host = carve(payload.host[behind:], results) if payload.host is not None else work.results
    pairs = {name: (array, on_host[name]) for name, array in work.results.items()}

    def cut(regions: dict[str, Tensor]) -> tuple[Partition, Staging | None]:
        """Return what is sent of the payload, cut into chunks."""
        staging = _staging(memory, regions, payload.host, order, records, pairs)
        return Partition.of(staging.host if staging else regions, site.world, records, on_host), staging

    def beginning(used: int) -> tuple[Partition, Staging | None]:
        ((name, array),) = regions.items()
        if not 0 <= used <= array.nbytes or used % array.element_size():
            raise ValueError(
                f"{label}: expected a payload of whole elements and at most {array.nbytes} bytes, got {used}"
            )
        return cut({name: array[: used // array.element_size()]})

    chunks, staging = cut(regions)
    return Round(
        *(codec, properties, label, work, collective, preludes),
        layout=chunks,
        cut=beginning if layout.varies else None,
        to_encode=encoded_by_chunk(layout, work, order),
        parts=decoded_by_chunk(layout, work, collective.order(site.rank, site.world)),
        staging=staging,
        waits=waits,
        exact=exact,
    )


def _make_carry(memory: Memory, layout: Layout, work: Work, collective: Collective) -> None:
    """Let merging keep what it keeps where payloads are exchanged, for the elements that this rank merges."""
    site, records, rows = memory.site, layout.records, layout.carries
    device = torch.device("cpu") if site.staged else site.device.where
    merged = collective.merged(site.rank, site.world) if rows else []

    def span(name: str, chunks: range) -> tuple[int, int]:
        """Return the first element of a region in consecutive chunks, and the end."""
        count, record = work.regions[name].numel(), records.get(name, 1)
        first, last = (chunk_bounds(count, chunk, site.world, record) for chunk in (chunks[0], chunks[-1]))
        return first[0], last[1]

    spans = [{name: span(name, chunks) for name in rows} for chunks in merged]
    work.carry = carries(rows, work.regions, spans, device)


def _prelude(memory: Memory, arrays: Arrays) -> Prelude:
    # Larger elements first, so that every array is aligned within a frame.
    arrays, site = dict(sorted(arrays.items(), key=lambda named: -named[1].element_size())), memory.site
    collective = for_prelude(sum(array.nbytes for array in arrays.values()), site.world)
    chunks = 1 if collective is everywhere else site.world
    nbytes = nbytes_of({name: (array.dtype, array.numel()) for name, array in arrays.items()})
    host = site.device.host_zeros(nbytes, torch.uint8) if site.staged else None
    staging = _staging(memory, arrays, host, collective.needed(site.rank, site.world), {})
    collective = on_device.of(collective) if site.link else collective
    return Prelude(Partition.of(staging.host if staging else arrays, chunks), collective, staging)


def _staging(
    memory: Memory,
    arrays: Arrays,
    host: Tensor | None,
    order: list[int],
    records: Mapping[str, int],
    results: dict[str, tuple[Tensor, Tensor]] | None = None,
) -> Staging | None:
    """Return the copy of some arrays in host memory, if they are exchanged from there."""
    if host is None:
        return None
    regions = {name: (array.dtype, array.numel()) for name, array in arrays.items()}
    return Staging(memory.site.device, arrays, carve(host, regions), order, records, results)


# ---- parts of a bucket, by the chunks that they need ---------------------------------------------
#
# Chunks are needed one after the other, and become complete one after the other, in orders that the collective knows.
# A part of a tensor has to be encoded with the first chunk that holds some of its payload, while earlier chunks are on
# their way; and can be decoded with the last such chunk, while later ones are. All of this is known before the first
# step.

#: Below this many elements a bucket is encoded and decoded in one go: the parts would cost more than they hide.
MIN_ELEMENTS = 1 << 18
#: Parts are cut so that a chunk holds about this many.
_PARTS_PER_CHUNK = 4


def decoded_by_chunk(layout: Layout, work: Work, order: list[int]) -> dict[int, tuple[Part, ...]]:
    """Return what each chunk makes ready, all parts together covering the bucket; or nothing.

    Args:
        order: the chunks in the order in which they become complete on this rank.
    """
    return _by_chunk(layout, work, order, max)


def encoded_by_chunk(layout: Layout, work: Work, order: list[int]) -> dict[int, tuple[Part, ...]]:
    """Return what each chunk needs that no earlier one did, all parts together covering the bucket; or nothing.

    Args:
        order: the chunks in the order in which this rank's payload is needed.
    """
    return _by_chunk(layout, work, order, min) if layout.cutting and layout.cutting.encoding else {}


def _by_chunk(
    layout: Layout, work: Work, order: list[int], choose: Callable[[Iterable[int]], int]
) -> dict[int, tuple[Part, ...]]:
    cutting = layout.cutting
    if cutting is None or work.world == 1 or work.bucket.count < MIN_ELEMENTS:
        return {}
    turn = {chunk: number for number, chunk in enumerate(order)}
    found: dict[int, list[Part]] = {}
    for position in range(len(work.bucket.tensors)):
        for part in _cut(cutting, work, position):
            needs = cutting.needs(work, part)
            chunk = order[choose(turn[needed] for needed in _chunks_for(needs, layout.records, work))]
            parts = found.setdefault(chunk, [])
            last = parts[-1] if parts else None
            if last and last.position == part.position and last.stop == part.start:
                parts[-1] = Part(part.position, last.start, part.stop)  # joined, where they touch
            else:
                parts.append(part)
    return {chunk: tuple(parts) for chunk, parts in found.items()}


def _cut(cutting: Cutting, work: Work, position: int) -> list[Part]:
    if cutting.ends:
        ends = cutting.ends[position]
        return [Part(position, *bounds) for bounds in pairwise([0, *ends])]
    tensor, granule = work.bucket.tensors[position], cutting.granules[position]
    least = work.bucket.count // (_PARTS_PER_CHUNK * work.world)
    size = granule * -(-least // granule)
    return [Part(position, at, min(at + size, tensor.count)) for at in range(0, tensor.count, size)]


def _chunks_for(needs: Mapping[str, tuple[int, int]], records: Mapping[str, int], work: Work) -> set[int]:
    """Return the chunks that hold what a part needs of the payload."""
    chunks: set[int] = set()
    for region, (start, stop) in needs.items():
        count, record = work.regions[region].numel(), records.get(region, 1)
        for chunk in range(work.world):
            low, high = chunk_bounds(count, chunk, work.world, record)
            if low < stop and start < high:
                chunks.add(chunk)
    return chunks
