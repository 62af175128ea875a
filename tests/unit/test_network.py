"""The formulas of exchanges: bytes, limits, and an event by event simulation of small rings."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from horovod_compress.cli.plan.network import (
    FORMULAS,
    GOODPUT,
    Link,
    PayloadCost,
    crowded,
    everywhere,
    fold,
    gather,
    nbytes,
    phase,
    ring,
    rounds,
    segments_of,
    torus,
    traffic,
    within_host,
)
from horovod_compress.codecs import registry
from horovod_compress.exchange.choose import _FITTING, for_prelude
from horovod_compress.exchange.wire import HEADER_BYTES
from horovod_compress.schedule.plan import Bucket, TensorSpec

GIGABIT = Link(125e6, 1e-4, 0.0)


def bucket(*shape: int) -> Bucket:
    return Bucket(0, (TensorSpec("weight", shape, "float32"),))


# ---- formulas ---------------------------------------------------------------------------------


def test_every_collective_has_a_formula() -> None:
    names = {name for fitting in _FITTING.values() for name in fitting}
    names |= {for_prelude(size, 4).name for size in (8, 1 << 30)}
    assert names == set(FORMULAS)


@pytest.mark.parametrize("ranks", [2, 3, 4, 16])
def test_rings_folds_and_tori_send_the_same_and_gathered_payloads_grow(ranks: int) -> None:
    payload = PayloadCost(1e6)
    assert ring(payload, ranks, GIGABIT).sent == pytest.approx(2 * (ranks - 1) / ranks * 1e6)
    assert fold(payload, ranks, GIGABIT).sent == pytest.approx(2 * (ranks - 1) / ranks * 1e6)
    assert torus(payload, ranks, GIGABIT).sent == pytest.approx(2 * (ranks - 1) / ranks * 1e6)
    assert everywhere(payload, ranks, GIGABIT).sent == (ranks - 1) * 1e6
    assert gather(payload, ranks, GIGABIT).sent == pytest.approx((ranks - 1) * (1e6 + 8))


@pytest.mark.parametrize("name", sorted(FORMULAS))
def test_more_of_anything_bad_is_never_faster(name: str) -> None:
    formula, usual = FORMULAS[name], PayloadCost(3e6, 1e-3, 1e-10)
    seconds = formula(usual, 4, GIGABIT).seconds
    assert formula(usual, 4, Link(250e6, 1e-4, 0.0)).seconds < seconds
    assert formula(usual, 4, Link(125e6, 1e-3, 0.0)).seconds > seconds
    assert formula(usual, 8, GIGABIT).seconds > seconds
    for worse in (PayloadCost(4e6, 1e-3, 1e-10), PayloadCost(3e6, 1, 1e-10), PayloadCost(3e6, 1e-3, 1e-6)):
        assert formula(worse, 4, GIGABIT).seconds >= seconds
    assert formula(usual, 4, Link(125e6, 1e-4, 1e-2)).seconds > seconds


@pytest.mark.parametrize("name", ["ring", "fold", "torus"])
def test_a_large_payload_is_limited_by_the_link_only(name: str) -> None:
    found = FORMULAS[name](PayloadCost(1e9), 4, GIGABIT)
    assert found.seconds == pytest.approx(found.sent / (GOODPUT * 125e6), rel=0.02)


def test_a_ring_of_one_segment_per_chunk_is_affine_in_its_bytes() -> None:
    def at(size: float) -> float:
        return ring(PayloadCost(size, 0.0, 1e-9), 4, GIGABIT).seconds

    assert at(2e5) - at(1e5) == pytest.approx(at(3e5) - at(2e5))
    assert at(0) == pytest.approx(6 * (1e-4 + HEADER_BYTES / (GOODPUT * 125e6)))


def test_a_torus_has_fewer_hops_than_a_ring() -> None:
    """Of 64 ranks 28 instead of 126; where latency is all that counts, its time is as much shorter."""
    far = Link(1e15, 1.0, 0.0)
    assert ring(PayloadCost(64.0), 64, far).seconds == pytest.approx(126, rel=1e-6)
    assert torus(PayloadCost(64.0), 64, far).seconds == pytest.approx(28, rel=1e-6)


def test_one_rank_exchanges_nothing() -> None:
    assert all(formula(PayloadCost(1e6), 1, GIGABIT).sent == 0 for formula in FORMULAS.values())
    assert ring(PayloadCost(1e6), 1, GIGABIT).seconds == 0


def test_chunks_are_cut_as_the_layout_cuts_them() -> None:
    import torch

    from horovod_compress.exchange.collective import Partition

    for size in (1000, 1 << 20, 10 << 20, 200 << 20):
        layout = Partition.of({"payload": torch.empty(size, dtype=torch.uint8)}, 4)
        assert segments_of(size / 4) == layout.most_segments


def simulated_ring(size: float, ranks: int, link: Link, processor: float) -> float:
    """Return the end of a ring: a link sends one segment at a time, a processor handles one at a time.

    All ranks do the same at the same time, so a rank's own past is what its neighbour sent.
    """
    number = segments_of(size / ranks)
    busy = link.seconds(size / ranks / number)
    sent_until = handled_until = 0.0
    ready = [0.0] * number  # when each segment can be sent at this hop
    for _ in range(2 * (ranks - 1)):
        for place in range(number):
            sent_until = max(sent_until, ready[place]) + busy
            handled_until = max(handled_until, sent_until + link.latency) + processor
            ready[place] = handled_until
    return handled_until


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [1e4, 1e6, 4e6, 4e7])
@pytest.mark.parametrize("processor", [0.0, 2e-4, 5e-3])
def test_the_ring_is_that_of_a_simulation(ranks: int, size: float, processor: float) -> None:
    link = Link(125e6, 2e-4, processor)
    found = ring(PayloadCost(size), ranks, link).seconds
    exact = simulated_ring(size, ranks, link, processor)
    if segments_of(size / ranks) == 1:
        assert found == pytest.approx(exact)
    assert found == pytest.approx(exact, rel=0.16)  # filling the pipe is left out


def test_messages_of_a_phase_follow_each_other() -> None:
    assert phase(0, 1.0, 1.0, 1.0) == 0
    assert phase(1, 2.0, 1.0, 0.5) == 3.5
    assert phase(10, 2.0, 1.0, 0.5) == 21.5


def test_a_hierarchy_sends_less_over_the_hosts_link_than_a_ring_through_it() -> None:
    inside = within_host(1e8, 8, Link(12.5e9, 1e-5, 0.0))
    found, flat = inside + ring(PayloadCost(1e8 / 8), 4, crowded(GIGABIT, 8)), ring(PayloadCost(1e8), 32, GIGABIT)
    assert 8 * found.sent == pytest.approx(2 * 3 / 4 * 1e8)
    assert found.seconds == pytest.approx(8 * found.sent / (GOODPUT * 125e6), rel=0.1) and found.seconds < flat.seconds
    assert inside.seconds == pytest.approx(0.016, rel=0.02) and not inside.sent


# ---- bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.methods())
def test_bytes_are_those_of_the_codec(name: str) -> None:
    codec = registry.create(name)
    for kind, share in rounds(codec):
        found = traffic(kind, bucket(300, 400), 4)
        layout = kind.layout(bucket(300, 400), 4)
        sent = layout.regions
        passed_on = sent | (layout.results if found.payload.collective == "fold" else {})
        assert 0 < share <= 1 and found.payload.nbytes == (nbytes(sent) + nbytes(passed_on)) / 2
        assert len(found.preludes) == len(layout.preludes)
        assert found.payload.collective in FORMULAS
    assert sum(share for _, share in rounds(codec)) == pytest.approx(1)


def test_full_precision_rounds_have_their_share() -> None:
    (usual, most), (full, few) = rounds(registry.create("marsit", full_precision_every=10))
    assert (usual.name, full.name) == ("marsit", "full precision") and (most, few) == pytest.approx((0.9, 0.1))
    assert len(rounds(registry.create("marsit", full_precision_every=0))) == 1


def test_a_gathered_payload_may_fill_a_part_of_its_room() -> None:
    topk = registry.create("topk")
    full, half = traffic(topk, bucket(300, 400), 4), traffic(topk, bucket(300, 400), 4, filled=0.5)
    assert half.payload.nbytes == full.payload.nbytes / 2
