"""Payloads that are exchanged from copies in host memory give the bits and the messages of those that are not."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import pytest
import torch

from horovod_compress.codecs.work import Work
from horovod_compress.exchange.transports.transport import Transport
from tests.battery.both_ways import MIXED, STEPS, TENSORS, with_infinity
from tests.battery.cases import CASES, each_case
from tests.battery.kept import Kept, kept, same
from tests.battery.toys import Steps
from tests.support.accelerator import FakeAccelerator, everything_on_accelerator
from tests.support.arithmetic import Gpu, OfGpu
from tests.support.local import Fleet, random_grads, spec
from tests.support.marks import each_value, slow
from tests.support.samples import FEW, Sample
from tests.support.turns import decode_in_parts


def _run(case: Sample, world: int, tensors: list, **options: Any) -> tuple[list[Kept], Kept, list[list[str]]]:
    """Return results, what is kept, and a digest of every message of every rank, in order."""
    sent: list[list[str]] = [[] for _ in range(world)]

    def wrap(transport: Transport) -> Transport:
        send = transport.send

        def listening(data: torch.Tensor, to: int) -> object:
            sent[transport.rank].append(f"{to} {hashlib.sha256(data.numpy()).hexdigest()}")
            return send(data, to)

        transport.send = listening  # type: ignore[method-assign, assignment]
        return transport

    with case.fleet(world, tensors, wrap=wrap, **options) as fleet:
        results = [fleet.step(random_grads(world, tensors, seed=number)) for number in range(STEPS)]
        for reducer in fleet.reducers:
            assert reducer.wait_idle(5.0)
        return results, kept(fleet), sent


def _accelerators(fleet: Fleet) -> list[FakeAccelerator]:
    return [
        where
        for reducer in fleet.reducers
        for where in reducer.context.devices.values()
        if isinstance(where, FakeAccelerator)
    ]


def _check(case: Sample, world: int, tensors: list, **options: Any) -> None:
    results, left, sent = _run(case, world, tensors, **options)
    with everything_on_accelerator():
        staged, left_there, sent_there = _run(case, world, tensors, **options)
    assert all(same(a, b) for a, b in zip(results, staged, strict=True))
    assert same(left, left_there) and sent == sent_there
    assert world == 1 or sum(map(len, sent))


@each_value
@each_case(quick=FEW)
@pytest.mark.parametrize("world", [3, *slow(1, 2, 4)])
def test_staged_payloads_give_the_same_bits(case: Sample, world: int) -> None:
    for exchange in case.exchanges() if world in case.worlds(world) else []:
        _check(case, world, TENSORS, exchange=exchange)


@each_case(quick=FEW)
def test_staged_payloads_of_several_buckets_and_dtypes(case: Sample) -> None:
    _check(case, 3, MIXED, schedule="layerwise")


@each_value
@each_case(quick=FEW)
@pytest.mark.parametrize("world", [3, *slow(2)])
def test_chunks_are_staged_in_time(case: Sample, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoding and decoding in parts, with preludes that are folded too."""
    decode_in_parts(monkeypatch)
    monkeypatch.setattr("horovod_compress.exchange.choose._SMALL_BYTES", 0)
    for exchange in case.exchanges() if world in case.worlds(world) else []:
        _check(case, world, TENSORS, exchange=exchange)


@each_case()
def test_staged_values_that_are_not_finite(case: Sample) -> None:
    """Every rank gets NaN, keeps what it has, and goes on."""
    plain, left = with_infinity(case)
    with everything_on_accelerator():
        staged, left_there = with_infinity(case)
    assert all(same(a, b) for a, b in zip(plain, staged, strict=True)) and same(left, left_there)
    assert bool(torch.isnan(staged[1][0]["x"]).all())


def test_staging_copies_the_payload_and_no_more() -> None:
    """The positive control: bits are what is copied, to the host and back, and a count for each tensor."""
    tensors = [spec("a", 64 * 512)]
    groups = -(-512 // 5)
    for world, levels, nbytes in ((2, 2, 2 * 64 * 512 // 8), (2, 3, groups * (40 + 40)), (3, 3, groups * (40 + 64))):
        options = {"full_precision_every": 0, "step_size": 1.0, "levels": levels}
        with everything_on_accelerator(), Fleet(world, tensors, "marsit", **options) as fleet:
            fleet.step(random_grads(world, tensors))
            for where in _accelerators(fleet):
                assert where.copied == nbytes + 8
            assert len(_accelerators(fleet)) == world
    with contextlib.ExitStack() as nothing, Fleet(2, tensors, "marsit") as fleet:
        assert nothing and not _accelerators(fleet)  # gradients of the CPU are exchanged from where they are packed
        assert all(round_.staging is None for r in fleet.reducers for round_ in r.buckets[0].rounds.kinds.values())


@each_case(quick=FEW)
def test_no_result_depends_on_how_a_gpu_rounds(case: Sample) -> None:
    """Nor on how torch adds up there, or what it fuses."""
    tensors = [*TENSORS, spec("y", 129, dtype=torch.float16)]
    for world in (1, 2):
        if not case.worlds(world):
            continue
        results, left, sent = _run(case, world, tensors)
        with everything_on_accelerator(Gpu), OfGpu():
            there, left_there, sent_there = _run(case, world, tensors)
        assert all(same(a, b) for a, b in zip(results, there, strict=True))
        assert same(left, left_there) and sent == sent_there


def test_a_method_that_divides_by_a_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, on the threads for exchange and decoding too."""
    case = next(case for case in CASES if case.name == "toy_steps")
    momentum = Steps._x

    def divided(codec: Steps, work: Work, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(x / 3 for x in momentum(codec, work, position))  # type: ignore[return-value]

    monkeypatch.setattr(Steps, "_x", divided)
    with pytest.raises(AssertionError):
        test_no_result_depends_on_how_a_gpu_rounds(case)
