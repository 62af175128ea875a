"""Makes a bucket's rounds out of its memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...codecs.base import Algebra, Codec
from ...codecs.carry import carries
from ...codecs.work import Work
from ...exchange import everywhere, on_device
from ...exchange.base import Collective
from ...exchange.choose import for_prelude
from ...exchange.layout import Layout, chunk_bounds
from .arrivals import decoded_by_chunk, encoded_by_chunk
from .memory import Memory, Payload, carve, nbytes_of
from .round import Prelude, Round
from .staging import Staging

Arrays = dict[str, Tensor]


def make_round(memory: Memory, codec: Codec, label: str, payload: Payload, kept: Mapping[str, Tensor]) -> Round:
    """Return a kind of round.

    Args:
        label: names it in frames.
        kept: what it works with of the bucket's state.
    """
    arrays = codec.preludes(memory.bucket)
    shared = [memory.allocate(each) for each in arrays]
    work = _work(memory, codec, payload, kept, shared)
    codec.prepare(work)
    preludes = tuple(_prelude(memory, each) for each in shared)
    collective = _collective(memory, codec, work)
    if codec.algebra is Algebra.GATHER:
        return _gathering(memory, codec, label, work, collective, preludes)
    return _reducing(memory, codec, label, work, collective, preludes, payload)


def _work(memory: Memory, codec: Codec, payload: Payload, kept: Mapping[str, Tensor], shared: list[Arrays]) -> Work:
    bucket, arrays = memory.bucket, codec.local(memory.bucket)
    local = carve(memory.scratch, arrays) if codec.local_is_scratch else memory.allocate(arrays, codec.folded)
    return Work(
        bucket,
        memory.site.world,
        memory.grads,
        dict(kept),
        memory.tables,
        carve(payload.memory, codec.regions(bucket)),
        {name: array for each in shared for name, array in each.items()},
        local,
        momenta=memory.momenta,
        divisors=memory.divisors,
        together=memory.site.device.apart and codec.offers_together(),
    )


def _collective(memory: Memory, codec: Codec, work: Work) -> Collective:
    site, regions = memory.site, work.regions.values()
    found = site.choose(codec, sum(array.nbytes for array in regions), site.world, {array.dtype for array in regions})
    return on_device.of(found) if site.link and codec.algebra is not Algebra.GATHER else found


def _gathering(
    memory: Memory, codec: Codec, label: str, work: Work, collective: Collective, preludes: tuple[Prelude, ...]
) -> Round:
    assert memory.inbox is not None
    layout = Layout.of(work.regions, memory.site.world, codec.records())
    inbox = memory.inbox.of(sum(array.nbytes for array in work.regions.values()))
    return Round(codec, label, work, layout, collective, {}, {}, preludes, inbox, None, memory.gather)


def _reducing(
    memory: Memory,
    codec: Codec,
    label: str,
    work: Work,
    collective: Collective,
    preludes: tuple[Prelude, ...],
    payload: Payload,
) -> Round:
    site, bucket = memory.site, memory.bucket
    _make_carry(memory, codec, work, collective)
    order = collective.needed(site.rank, site.world)
    results = codec.results(bucket) if collective.name == "fold" and site.world > 1 else {}
    behind = nbytes_of(codec.regions(bucket))
    work.results = carve(payload.memory[behind:], results)
    on_host = carve(payload.host[behind:], results) if payload.host is not None else work.results
    pairs = {name: (array, on_host[name]) for name, array in work.results.items()}
    staging = _staging(memory, work.regions, payload.host, order, codec.records(), pairs)
    layout = Layout.of(staging.host if staging else work.regions, site.world, codec.records(), on_host)
    to_encode = encoded_by_chunk(codec, work, order)
    parts = decoded_by_chunk(codec, work, collective.order(site.rank, site.world))
    return Round(codec, label, work, layout, collective, to_encode, parts, preludes, None, staging, None)


def _make_carry(memory: Memory, codec: Codec, work: Work, collective: Collective) -> None:
    """Let merging keep what it keeps where payloads are exchanged, for the elements that this rank merges."""
    site, records = memory.site, codec.records()
    rows, device = codec.carries(site.world), torch.device("cpu") if site.staged else site.device.where
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
    return Prelude(Layout.of(staging.host if staging else arrays, chunks), collective, staging)


def _staging(
    memory: Memory,
    arrays: Arrays,
    host: Tensor | None,
    order: list[int],
    records: dict[str, int],
    results: dict[str, tuple[Tensor, Tensor]] | None = None,
) -> Staging | None:
    """Return the copy of some arrays in host memory, if they are exchanged from there."""
    if host is None:
        return None
    regions = {name: (array.dtype, array.numel()) for name, array in arrays.items()}
    return Staging(memory.site.device, arrays, carve(host, regions), order, records, results)
