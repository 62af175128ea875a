"""The collectives over GPU memory give the bits of those between hosts; a stand-in for NCCL moves the bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_compress.codecs.base import Algebra
from horovod_compress.exchange.device import Device
from horovod_compress.exchange.transports.nccl import NcclTransport
from horovod_compress.exchange.transports.transport import NcclLink, Transport
from tests.battery.both_ways import MIXED, STEPS, TENSORS, with_infinity
from tests.battery.cases import each_case
from tests.battery.kept import Kept, kept, same
from tests.support import nccl
from tests.support.local import Fleet, random_grads
from tests.support.marks import each_value, slow
from tests.support.samples import FEW, Sample
from tests.support.turns import decode_in_parts


def linked(world: int) -> dict[str, Any]:
    """Return what lets a fleet exchange payloads through the stand-in."""
    shared = nccl.World(world)

    def wrap(tokens: Transport) -> Transport:
        library = shared.library()
        communicator = library.NcclCommunicator(world, (0,) * 128, tokens.rank)
        return NcclTransport(tokens, NcclLink(library, communicator, Device(), tokens.rank, world))

    return {"wrap": wrap, "devices": lambda transport: lambda name: transport.link.where}


def over_links(case: Sample) -> list[str]:
    """Return the values of ``exchange`` that a link serves."""
    return [exchange for exchange in case.exchanges() if exchange != "torus"]


def _over_the_ring(transport: Transport) -> Transport:
    """Let nothing be added up by the transport itself, which rounds in another order; NCCL's does not."""
    transport.adds = frozenset()
    return transport


def _run(case: Sample, world: int, tensors: list, **options: Any) -> tuple[list[Kept], Kept, Fleet]:
    with case.fleet(world, tensors, **options) as fleet:
        results = [fleet.step(random_grads(world, tensors, seed=number)) for number in range(STEPS)]
        for reducer in fleet.reducers:
            assert reducer.wait_idle(5.0)
        return results, kept(fleet), fleet


def _check(case: Sample, world: int, tensors: list, **options: Any) -> None:
    results, left, fleet = _run(case, world, tensors, **options, wrap=_over_the_ring)
    linked_results, left_there, linked_fleet = _run(case, world, tensors, **options, **linked(world))
    assert all(same(a, b) for a, b in zip(results, linked_results, strict=True)) and same(left, left_there)
    for one, other in zip(fleet.reducers, linked_fleet.reducers, strict=True):
        for mine, theirs in zip(one.buckets, other.buckets, strict=True):
            _same_payloads(case, mine, theirs)
        groups = other.context.transport.link._library.groups
        assert groups > 0 if world > 1 else groups == 0
        assert other.context.transport.link._library.world.left() == 0


def _same_payloads(case: Sample, mine: Any, theirs: Any) -> None:
    """Compare the consensus bytes of the last step, which methods of sums multiply by something afterwards."""
    a, b = mine.round(STEPS - 1).work, theirs.round(STEPS - 1).work
    if case.codec().for_step(STEPS - 1).algebra is Algebra.GATHER:
        assert all(torch.equal(x, y) for x, y in zip(a.gathered, b.gathered, strict=True))
    else:
        for name, region in a.regions.items():
            assert torch.equal(region.view(torch.uint8), b.regions[name].view(torch.uint8)), name


@each_value
@each_case(quick=FEW)
@pytest.mark.parametrize("world", [3, *slow(1, 2, 4)])
def test_payloads_on_a_device_give_the_same_bits(case: Sample, world: int) -> None:
    for exchange in over_links(case) if world in case.worlds(world) else []:
        _check(case, world, TENSORS, exchange=exchange)


@each_case(quick=FEW)
def test_several_buckets_and_dtypes(case: Sample) -> None:
    _check(case, 3, MIXED, schedule="layerwise")


@each_value
@each_case(quick=FEW)
@pytest.mark.parametrize("world", [3, *slow(2)])
def test_many_segments_parts_and_folded_preludes(case: Sample, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decode_in_parts(monkeypatch)
    monkeypatch.setattr("horovod_compress.exchange.choose._SMALL_BYTES", 0)
    monkeypatch.setattr("horovod_compress.exchange.collective.MIN_SEGMENT_BYTES", 512)
    for exchange in over_links(case) if world in case.worlds(world) else []:
        _check(case, world, TENSORS, exchange=exchange)


@each_case()
def test_values_that_are_not_finite(case: Sample) -> None:
    """Every rank gets NaN, keeps what it has, and goes on."""
    (plain, left), (there, left_there) = with_infinity(case), with_infinity(case, **linked(2))
    assert all(same(a, b) for a, b in zip(plain, there, strict=True)) and same(left, left_there)
