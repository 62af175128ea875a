"""The bytes of every step are what the layout says, to the last one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import Algebra, variants_of
from horovod_compress.codecs.work import Layout, Regions
from horovod_compress.engine.reducer import Reducer
from horovod_compress.exchange.transports.transport import Transport
from tests.battery.cases import each_case
from tests.support.local import random_grads, spec
from tests.support.marks import each_value, slow
from tests.support.samples import Sample

#: The first comparison has step, plan, a hash for update mode, what is frozen, norms, digest.
HEADER, AGREE, LENGTH = 64, 48, 8
#: More bytes than this, times the other ranks, make a prelude a fold.
SMALL = 256 * 1024
TENSORS = [spec("a", 50, 41), spec("b", 129), spec("c"), spec("d", 3, dtype=torch.float64)]


def _size(regions: Regions) -> int:
    return sum(dtype.itemsize * count for dtype, count in regions.values())


def _chunks(regions: Regions, world: int, records: dict[str, int]) -> list[int]:
    """Return the bytes of all chunks: every array is shared out evenly, in whole records."""
    sizes = [0] * world
    for name, (dtype, count) in regions.items():
        record = records.get(name, 1)
        cuts = [count // record * index // world * record for index in range(world + 1)]
        sizes = [
            size + dtype.itemsize * (stop - start) for size, (start, stop) in zip(sizes, pairwise(cuts), strict=True)
        ]
    return sizes


def _ring(chunks: list[int], rank: int) -> int:
    """Return what one rank sends in a ring: chunk r-h at hop h of 2(M-1)."""
    world = len(chunks)
    return sum(HEADER + chunks[(rank - hop) % world] for hop in range(2 * (world - 1)))


def _torus(chunks: list[int], rank: int, rows: int) -> int:
    """Return what one rank sends in a torus: a group of chunks at each hop along its row, one chunk down a column."""
    columns = len(chunks) // rows
    row, column = divmod(rank, columns)
    groups = [column + turn - hop for hop in range(columns - 1) for turn in (0, 1)]
    sent = [group % columns * rows + part for group in groups for part in range(rows)]
    parts = [row + turn - hop for hop in range(rows - 1) for turn in (0, 1)]
    sent += [(column + 1) % columns * rows + part % rows for part in parts]
    return sum(HEADER + chunks[chunk] for chunk in sent)


def _fold(chunks: list[int], rank: int, results: list[int] | None = None) -> int:
    """Return what one rank sends in a fold: each other rank its chunk, and all of them the result of its own."""
    sizes = [HEADER + size for size in chunks]
    return sum(sizes) - sizes[rank] + (len(sizes) - 1) * (HEADER + (results or chunks)[rank])


def _results(layout: Layout, chunks: list[int]) -> list[int]:
    """Return the bytes of what the owners of all chunks pass on."""
    regions, world = layout.regions, len(chunks)
    for name, (dtype, count) in layout.results.items():
        records = layout.records[name]
        of_result = {name: records * count // regions[name][1]}
        theirs = _chunks({name: regions[name]}, world, {name: records})
        passed_on = _chunks({name: (dtype, count)}, world, of_result)
        chunks = [all_ - old + new for all_, old, new in zip(chunks, theirs, passed_on, strict=True)]
    return chunks


def _prelude(regions: Regions, rank: int, world: int) -> int:
    """Return what one rank sends in a prelude: all to everyone where that is little, else a fold."""
    if _size(regions) * (world - 1) <= SMALL:
        return (world - 1) * (HEADER + _size(regions))
    return _fold(_chunks(regions, world, {}), rank)


def _expected(reducer: Reducer, case: Sample, step: int) -> int:
    """Return what one rank sends in a step; asked after it, as some payloads have any length."""
    rank, world = reducer.rank, reducer.world
    total = (world - 1) * (HEADER + AGREE) if step == 0 else 0
    codec = case.codec().for_step(step)
    for state in reducer.buckets:
        layout, name = codec.layout(state.bucket, world), state.round(step).collective.name
        regions = layout.regions
        total += sum(_prelude(arrays, rank, world) for arrays in layout.preludes)
        if codec.algebra is Algebra.GATHER:
            assert set(regions) == {"payload"} and name == "gather"
            used = state.round(step).work.used
            assert 0 <= used <= _size(regions)
            total += (world - 1) * (HEADER + LENGTH + HEADER + used)
        else:
            if layout.varies:
                ((name_of_one, (dtype, most)),) = regions.items()
                used = state.round(step).work.used
                assert used % dtype.itemsize == 0 and 0 <= used <= dtype.itemsize * most
                regions = {name_of_one: (dtype, used // dtype.itemsize)}
            chunks = _chunks(regions, world, layout.records)
            if name == "ring":
                total += _ring(chunks, rank)
            elif name.startswith("torus"):
                total += _torus(chunks, rank, int(name.partition(":")[2]))
            else:
                total += _fold(chunks, rank, _results(layout, chunks))
    return total


@each_value
@each_case()
@pytest.mark.parametrize("world", [1, 3, *slow(2, 4)])
def test_bytes_are_those_of_the_layout(case: Sample, world: int) -> None:
    """The counter and what the transport was handed are both exactly that."""
    for exchange in case.exchanges() if world in case.worlds(world) else []:
        handed = [0] * world

        def wrap(transport: Transport) -> Transport:
            send = transport.send

            def counting(data: Tensor, to: int) -> object:
                handed[transport.rank] += data.numel()
                return send(data, to)

            transport.send = counting  # type: ignore[method-assign, assignment]
            return transport

        options = dict(exchange=exchange, schedule="layerwise", verify_every=0, wrap=wrap)
        aside = (world - 1) * (HEADER + AGREE)  # the first comparison has messages of its own
        with case.fleet(world, TENSORS, **options) as fleet:
            before = [0] * world
            for step in range(4):
                fleet.step(random_grads(world, TENSORS, seed=step))
                now = [reducer.metrics.bytes_sent for reducer in fleet.reducers]
                assert now == [aside + given for given in handed]
                due = [_expected(reducer, case, step) for reducer in fleet.reducers]
                assert [b - a for a, b in zip(before, now, strict=True)] == due
                assert world == 1 or min(due) > 0
                before = now


@each_case(lambda codec: any(kind.algebra is Algebra.GATHER for kind in variants_of(codec)))
def test_every_rank_holds_the_payloads_of_all(case: Sample) -> None:
    """Gathered payloads come in rank order, as long as their ranks made them; an empty bucket is decoded too."""
    tensors = [spec("a", 70), spec("b", 9)]
    with case.fleet(3, tensors, schedule="single") as fleet:
        for step in range(3):
            grads = random_grads(3, tensors, seed=step)
            grads[1]["b"].zero_()  # one rank may have less to say
            fleet.step(grads)
            works = [reducer.buckets[0].round(step).work for reducer in fleet.reducers]
            if case.codec().for_step(step).algebra is not Algebra.GATHER:
                continue
            own = [work.regions["payload"][: work.used] for work in works]
            for work in works:
                assert all(torch.equal(a, b) for a, b in zip(work.gathered, own, strict=True))
            assert sum(payload.numel() for payload in own) > 0
