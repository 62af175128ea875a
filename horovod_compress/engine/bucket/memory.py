"""The memory of one bucket: what is kept from step to step, and what its kinds of rounds share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...codecs.base import Algebra, Codec, variants_of
from ...codecs.work import Layout, Regions
from ...exchange import all_gatherv, on_device
from ...exchange.choose import Choose
from ...exchange.device import Device
from ...exchange.transports.link import NcclLink
from ...schedule.plan import Bucket
from .staging import StagedGather
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
    return {name for variant in variants for name in variant.folded}
