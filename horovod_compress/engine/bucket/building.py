"""Makes a bucket's rounds out of its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ...codecs.base import Algebra, Codec
from ...codecs.dense import Dense
from ...codecs.work import Layout, Work, carries
from ...exchange import everywhere, layout as exchanged, on_device
from ...exchange.base import Collective
from ...exchange.choose import for_prelude
from ...exchange.layout import chunk_bounds
from .arrivals import decoded_by_chunk, encoded_by_chunk
from .memory import Memory, Payload, carve, nbytes_of
from .round import Prelude, Round
from .staging import Staging

Arrays = dict[str, Tensor]
#: Makes a round of what is left to say.
Make = Callable[..., Round]


def make_round(memory: Memory, codec: Codec, label: str, payload: Payload, kept: Mapping[str, Tensor]) -> Round:
    """Return a kind of round.

    Args:
        label: names it in frames.
        kept: what it works with of the bucket's state.
    """
    layout = memory.layout(codec)
    shared = [memory.allocate(arrays) for arrays in layout.preludes]
    work = _work(memory, codec, layout, payload, kept, shared)
    codec.prepare(work)
    preludes = tuple(_prelude(memory, each) for each in shared)
    collective = _collective(memory, codec, layout, work)
    properties = codec.properties()
    waits = codec.batched and memory.site.device.is_accelerator
    make = partial(Round, codec, properties, label, work, collective, preludes, waits=waits)
    if codec.algebra is Algebra.GATHER:
        return _gathering(memory, layout, work, make)
    return _reducing(memory, layout, work, collective, payload, make)


def _work(
    memory: Memory,
    codec: Codec,
    layout: Layout,
    payload: Payload,
    kept: Mapping[str, Tensor],
    shared: list[Arrays],
) -> Work:
    scratch = carve(memory.scratch, layout.scratch)
    return Work(
        memory.bucket,
        memory.site.world,
        memory.grads,
        dict(kept),
        memory.tables,
        carve(payload.memory, layout.regions),
        {name: array for each in shared for name, array in each.items()},
        memory.allocate(layout.local, codec.folded) | scratch,
        momenta=memory.momenta,
        divisors=memory.divisors,
        withheld=memory.withheld.index,
    )


def _collective(memory: Memory, codec: Codec, layout: Layout, work: Work) -> Collective:
    site, regions = memory.site, work.regions.values()
    added = {array.dtype for array in regions} if isinstance(codec, Dense) else set()
    found = site.choose(codec, sum(array.nbytes for array in regions), site.world, added, bool(layout.results))
    return on_device.of(found) if site.link and codec.algebra is not Algebra.GATHER else found


def _gathering(memory: Memory, layout: Layout, work: Work, make: Make) -> Round:
    assert memory.inbox is not None
    chunks = exchanged.Layout.of(work.regions, memory.site.world, layout.records)
    inbox = memory.inbox.of(sum(array.nbytes for array in work.regions.values()))
    return make(layout=chunks, inbox=inbox, gather=memory.gather)


def _reducing(
    memory: Memory, layout: Layout, work: Work, collective: Collective, payload: Payload, make: Make
) -> Round:
    site, records = memory.site, layout.records
    _make_carry(memory, layout, work, collective)
    order = collective.needed(site.rank, site.world)
    results = layout.results if collective.name == "fold" and site.world > 1 else {}
    behind = nbytes_of(layout.regions)
    work.results = carve(payload.memory[behind:], results)
    on_host = carve(payload.host[behind:], results) if payload.host is not None else work.results
    pairs = {name: (array, on_host[name]) for name, array in work.results.items()}
    staging = _staging(memory, work.regions, payload.host, order, records, pairs)
    return make(
        layout=exchanged.Layout.of(staging.host if staging else work.regions, site.world, records, on_host),
        to_encode=encoded_by_chunk(layout, work, order),
        parts=decoded_by_chunk(layout, work, collective.order(site.rank, site.world)),
        staging=staging,
    )


def _make_carry(memory: Memory, layout: Layout, work: Work, collective: Collective) -> None:
    """Let merging keep what it keeps where payloads are exchanged, for the elements that this rank merges."""
    site, records, rows = memory.site, layout.records, layout.carries
    device = torch.device("cpu") if site.staged else site.device.where
    merged = collective.merged(site.rank, site.world) if rows else []
    spans = [
        {name: _span(work.regions[name].numel(), chunks, site.world, records.get(name, 1)) for name in rows}
        for chunks in merged
    ]
    work.carry = carries(rows, work.regions, spans, device)


def _span(count: int, chunks: range, world: int, record: int) -> tuple[int, int]:
    """Return the first element of a region in consecutive chunks, and the end."""
    return chunk_bounds(count, chunks[0], world, record)[0], chunk_bounds(count, chunks[-1], world, record)[1]


def _prelude(memory: Memory, arrays: Arrays) -> Prelude:
    # Larger elements first, so that every array is aligned within a frame.
    arrays, site = dict(sorted(arrays.items(), key=lambda named: -named[1].element_size())), memory.site
    collective = for_prelude(sum(array.nbytes for array in arrays.values()), site.world)
    chunks = 1 if collective is everywhere else site.world
    nbytes = nbytes_of({name: (array.dtype, array.numel()) for name, array in arrays.items()})
    host = site.device.host_zeros(nbytes, torch.uint8) if site.staged else None
    staging = _staging(memory, arrays, host, collective.needed(site.rank, site.world), {})
    collective = on_device.of(collective) if site.link else collective
    return Prelude(exchanged.Layout.of(staging.host if staging else arrays, chunks), collective, staging)


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
