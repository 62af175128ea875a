"""Encoding and decoding while chunks are under way give the bits of doing it before and after."""

from __future__ import annotations

import pytest
import torch

from horovod_compress.codecs.base import Algebra, Codec, variants_of
from horovod_compress.codecs.work import Layout, Work
from horovod_compress.engine.bucket import memory
from horovod_compress.exchange import fold, ring
from tests.battery.both_ways import TENSORS
from tests.battery.cases import each_case
from tests.battery.kept import Kept, kept, same
from tests.support.local import Fleet, random_grads
from tests.support.marks import each_value, slow
from tests.support.samples import ANY_BUCKET, Sample


def in_parts(codec: Codec) -> bool:
    """Return whether some kind of round can be decoded in parts."""
    return any(k.algebra is not Algebra.GATHER and k.layout(ANY_BUCKET, 1).cutting for k in variants_of(codec))


def _run(case: Sample, world: int, exchange: str) -> tuple[list[Kept], Kept, bool]:
    """Return results, what is kept, and whether anything was decoded in parts."""
    with case.fleet(world, TENSORS, exchange=exchange) as fleet:
        results = [fleet.step(random_grads(world, TENSORS, seed=number)) for number in range(4)]
        return results, kept(fleet), _used(fleet)


def _used(fleet: Fleet) -> bool:
    return any(round_.parts for r in fleet.reducers for s in r.buckets for round_ in s.rounds.kinds.values())


@each_value
@each_case(in_parts)
@pytest.mark.parametrize("world", [3, *slow(2, 4)])
def test_parts_give_the_bits_of_the_whole(case: Sample, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for exchange in case.exchanges():
        whole, left, used = _run(case, world, exchange)
        assert not used
        with monkeypatch.context() as patch:
            patch.setattr(memory, "MIN_ELEMENTS", 0)
            parts, left_by_parts, used = _run(case, world, exchange)
        assert used and same(left, left_by_parts)
        assert all(same(a, b) for a, b in zip(whole, parts, strict=True))


@each_case(in_parts)
@pytest.mark.parametrize("collective", [ring, fold])
def test_parts_cover_every_element_once_and_come_late_enough(
    case: Sample, collective: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MIN_ELEMENTS", 0)
    for world in case.worlds(2, 3):
        with case.fleet(world, TENSORS) as fleet:
            for codec, round_ in fleet.reducers[0].buckets[0].rounds.kinds.items():
                for rank in range(world):
                    order = collective.order(rank, world)  # type: ignore[attr-defined]
                    layout = codec.layout(round_.work.bucket, world)
                    parts = memory.decoded_by_chunk(layout, round_.work, order)
                    if layout.cutting and layout.cutting.encoding:
                        needed = collective.needed(rank, world)  # type: ignore[attr-defined]
                        _check_encoding(layout, round_.work, needed)
                    if round_.parts:
                        _check(layout, round_.work, parts, order)


def _check_encoding(layout: Layout, work: Work, needed: list[int]) -> None:
    """Count how often every element is encoded, and whether it is before its chunk is sent."""
    parts, cutting = memory.encoded_by_chunk(layout, work, needed), layout.cutting
    assert cutting
    seen = [torch.zeros(t.count, dtype=torch.int64) for t in TENSORS]
    sent: dict[str, set[int]] = {name: set() for name in work.regions}
    for chunk in needed:
        for part in parts.get(chunk, []):
            seen[part.position][part.start : part.stop] += 1
            for name, (low, high) in cutting.needs(work, part).items():
                assert not set(range(low, high)) & sent[name]
        for name, region in work.regions.items():
            record = layout.records.get(name, 1)
            sent[name] |= set(range(*memory.chunk_bounds(region.numel(), chunk, len(needed), record)))
    assert all(bool((count == 1).all()) for count in seen)
    assert len(parts) > 1


def _check(layout: Layout, work: Work, parts: dict, order: list[int]) -> None:
    """Count how often every element is decoded, and what has arrived by then."""
    regions, cutting = work.regions, layout.cutting
    assert cutting
    seen = [torch.zeros(t.count, dtype=torch.int64) for t in TENSORS]
    arrived: dict[str, set[int]] = {name: set() for name in regions}
    for chunk in order:
        for name, region in regions.items():
            record = layout.records.get(name, 1)
            arrived[name] |= set(range(*memory.chunk_bounds(region.numel(), chunk, len(order), record)))
        for part in parts.get(chunk, []):
            seen[part.position][part.start : part.stop] += 1
            for name, (low, high) in cutting.needs(work, part).items():
                assert set(range(low, high)) <= arrived[name]
    assert all(bool((count == 1).all()) for count in seen)
    assert len(parts) > 1  # else nothing would overlap


@each_case(in_parts)
def test_values_that_are_not_finite_stop_every_part(case: Sample, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that were decoded early would have changed what must stay."""
    monkeypatch.setattr(memory, "MIN_ELEMENTS", 0)
    with case.fleet(3, TENSORS) as fleet:
        for number in range(4):
            fleet.step(random_grads(3, TENSORS, seed=number))
            before, grads = kept(fleet), random_grads(3, TENSORS, seed=number)
            grads[1]["c"][17] = float("nan")
            assert all(bool(r.isnan().all()) for mine in fleet.step(grads) for r in mine.values())
            assert same(before, kept(fleet))
        assert _used(fleet)
