"""The torus: who sends what to whom, and that it is the ring's bytes in fewer hops."""

from __future__ import annotations

import math

import pytest
import torch

from horovod_compress.errors import ConfigError
from horovod_compress.exchange import on_device, torus
from horovod_compress.exchange.wire import GATHER, REDUCE
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.marks import slow
from tests.support.turns import decode_in_parts

SIZES = [(2, None), (4, None), (5, None), (6, None), (6, 3), (4, 4), (9, None), (12, 2), (16, None)]


@pytest.mark.parametrize(("world", "rows"), SIZES)
def test_what_one_rank_sends_the_other_waits_for_in_the_same_order(world: int, rows: int | None) -> None:
    places = [torus.of(world, rows).place(rank, world) for rank in range(world)]
    for rank, place in enumerate(places):
        sends = [*place.begin(), *(send for arrival in place.arrivals() for send in arrival.then)]
        for peer in range(world):
            sent = [(s.phase, s.hop, s.chunk) for s in sends if s.peer == peer]
            awaited = [(a.phase, a.hop, a.chunk) for a in places[peer].arrivals() if a.peer == rank]
            assert sent == awaited


@pytest.mark.parametrize(("world", "rows"), SIZES)
def test_every_chunk_is_merged_from_all_ranks_once_and_completes_once(world: int, rows: int | None) -> None:
    chosen = torus.of(world, rows)
    for rank in range(world):
        assert sorted(chosen.order(rank, world)) == sorted(chosen.needed(rank, world)) == list(range(world))
        place = chosen.place(rank, world)
        phases = [arrival.phase for arrival in place.arrivals()]
        assert phases == sorted(phases, key=[REDUCE, GATHER].index)
        hops = {arrival.hop for arrival in place.arrivals()}
        assert hops == set(range(2 * (place.columns - 1) + 2 * (place.rows - 1)))


def test_rows_are_as_many_as_come_nearest_to_a_square() -> None:
    found = {world: torus.of(world).rows for world in (1, 2, 4, 6, 7, 12, 16, 18, 64)}
    assert found == {1: 1, 2: 1, 4: 2, 6: 2, 7: 1, 12: 3, 16: 4, 18: 3, 64: 8}


def test_over_links_between_gpus_it_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match='exchange="torus:2" works in host memory only; choose transport="gloo"'):
        on_device.of(torus.of(4))


def test_rows_that_ranks_do_not_make_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'"torus:3" asks for 3 rows of equal length, which 4 ranks cannot form'):
        Fleet(4, [spec("a", 8)], "none", exchange="torus:3")
    with Fleet(1, [spec("a", 8)], "none", exchange="torus:3"):  # a script of many ranks runs alone, too
        pass
    for wrong in ("torus:", "torus:0", "torus:-2", "torus:x", "torus:2x2", "tor"):
        with pytest.raises(ConfigError, match="exchange should be one of"):
            Fleet(4, [spec("a", 8)], "none", exchange=wrong)


@pytest.mark.parametrize(("world", "exchange"), [(4, "torus"), (6, "torus"), (6, "torus:3"), *slow((16, "torus"))])
def test_it_adds_up_what_the_ring_does(world: int, exchange: str) -> None:
    """Whole numbers, whose sums are exact: so every rank's part was added once; odd lengths, empty chunks, NaN."""
    tensors = [spec("a", 1001), spec("b", 3), spec("c", 1 << 19)]
    grads = [{n: (100 * g).round() for n, g in mine.items()} for mine in random_grads(world, tensors)]
    exact = {t.name: sum(mine[t.name] for mine in grads) for t in tensors}
    with Fleet(world, tensors, "none", exchange=exchange, schedule="layerwise") as fleet:
        results = fleet.step(grads)
        assert all_same(results)
        assert all(torch.equal((world * results[0][t.name]).round(), exact[t.name]) for t in tensors)
        spoilt = random_grads(world, tensors, seed=1)
        spoilt[-1]["a"][7] = math.nan
        results = fleet.step(spoilt)
        assert all_same(results) and bool(results[0]["a"].isnan().all()) and bool(results[0]["b"].isfinite().all())


@pytest.mark.parametrize(("world", "exchange"), [(4, "torus"), (6, "torus"), (6, "torus:3")])
def test_it_sends_the_bytes_of_a_ring(world: int, exchange: str) -> None:
    count = 64 * 12 * 50
    payload = count // 8
    with Fleet(world, [spec("a", count)], "marsit", exchange=exchange, full_precision_every=0, step_size=0.1) as fleet:
        fleet.step(random_grads(world, fleet.tensors))
        place = torus.of(world, int(exchange[6:] or 0) or None).place(0, world)
        rows, columns = place.rows, place.columns
        frames = 2 * (columns - 1) * rows + 2 * (rows - 1)
        for reducer in fleet.reducers:
            sent = 2 * (world - 1) * payload // world + 64 * frames + (world - 1) * (64 + 48)
            assert reducer.metrics.document()["bytes_sent"] == sent


def test_parts_that_are_decoded_as_chunks_arrive_have_the_bits_of_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [spec("a", 3000, 100), spec("b", 77)]
    found = []
    for least in (1 << 18, 1 << 30):
        decode_in_parts(monkeypatch, least)
        with Fleet(4, tensors, "marsit", exchange="torus", schedule="single", full_precision_every=0) as fleet:
            found.append([fleet.step(random_grads(4, tensors, seed=number))[0] for number in range(3)])
    assert all(same_bits(one[n], other[n]) for one, other in zip(*found, strict=True) for n in one)


def test_what_merging_keeps_belongs_to_one_torus() -> None:
    """Counts of two rows mean nothing to three."""
    names = []
    for exchange in ("torus", "torus:3"):
        with Fleet(6, [spec("a", 3000)], "marsit", exchange=exchange, full_precision_every=0) as fleet:
            names.append(set(fleet.reducers[0].kept.carries()))
    assert all(len(found) == 2 for found in names) and not names[0] & names[1]
