"""What the transport adds up by itself: as over the ring but for rounding, equal on all ranks, in every mode."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.reducer import Next
from horovod_compress.errors import ExchangeError
from tests.support.accelerator import everything_on_accelerator
from tests.support.local import Fleet, random_grads, spec
from tests.support.marks import each_value

TENSORS = [spec("a", 70, 336), spec("b", 5), spec("empty", 0), spec("c", 9001), spec("d")]
#: Methods, and a step in which their buckets are plain.
PLAIN = {"none": ({}, 0), "marsit": ({"full_precision_every": 2}, 0), "momentum": ({}, 0)}


@pytest.fixture(autouse=True, params=[1 << 20, 0], ids=["whole", "in two parts"])
def small_ones_too(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr("horovod_compress.exchange.choose._SMALL_BYTES", 0)
    monkeypatch.setattr("horovod_compress.exchange.native.LARGE_BYTES", request.param)


def fleet_of(world: int, method: str = "none", exchange: str = "auto", **options: object) -> Fleet:
    if method == "momentum":  # what DGC leaves its small tensors to
        return Fleet(world, TENSORS, "dgc", exchange="auto", min_elements=1 << 20, **options)
    return Fleet(world, TENSORS, method, exchange=exchange, **options)


def collectives(fleet: Fleet) -> set[str]:
    return {state.round(r.step).collective.name for r in fleet.reducers for state in r.buckets}


def results(fleet: Fleet, world: int, steps: int = 1) -> list[list[dict[str, Tensor]]]:
    return [fleet.step(random_grads(world, TENSORS, seed=step)) for step in range(steps)]


@each_value
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("method", PLAIN)
def test_the_mean_on_every_rank(method: str, world: int, staged: bool) -> None:
    with everything_on_accelerator() if staged else nullcontext(), fleet_of(world, method) as fleet:
        assert collectives(fleet) == {"native"}
        ((first, *others),) = results(fleet, world)
    grads = random_grads(world, TENSORS, seed=0)
    for name, found in first.items():
        mean = torch.stack([mine[name].double() for mine in grads]).mean(0)
        assert bool(((found - mean).abs() < 1e-6).all())
        assert all(torch.equal(found, other[name]) for other in others)


def test_staged_sums_are_those_of_the_cpu() -> None:
    with fleet_of(3, "marsit", full_precision_every=2) as fleet:
        plain = results(fleet, 3, 4)
    with everything_on_accelerator(), fleet_of(3, "marsit", full_precision_every=2) as fleet:
        staged = results(fleet, 3, 4)
    for before, after in zip(plain, staged, strict=True):
        for mine, theirs in zip(before, after, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("exchange", ["ring", "fold"])
def test_other_exchanges_are_left_alone(exchange: str) -> None:
    with fleet_of(3, exchange=exchange) as fleet:
        assert collectives(fleet) == {exchange}


def test_sixteen_bit_floats_go_round_the_ring() -> None:
    with Fleet(3, [spec("a", 4096, dtype=torch.float16)], "none", exchange="auto") as fleet:
        assert collectives(fleet) == {"ring"}


def test_a_bucket_with_sparse_gradients() -> None:
    """They are counted in, and add nothing."""
    grads = random_grads(3, TENSORS)
    with fleet_of(3) as fleet:
        for reducer, mine in zip(fleet.reducers, grads, strict=True):
            for index, name in enumerate(fleet.plan.names()):
                if name == "c":
                    reducer.skip(index)
                else:
                    step = reducer.offer(index, mine[name].clone())
        index = fleet.plan.names().index("a")
        found = [reducer.result(index, step) for reducer in fleet.reducers]
    mean = torch.stack([mine["a"] for mine in grads]).mean(0)
    assert all(torch.equal(found[0], other) for other in found) and bool(((found[0] - mean).abs() < 1e-6).all())


def test_steps_without_the_method() -> None:
    with fleet_of(3, "topk", density=0.1) as fleet:
        for reducer in fleet.reducers:
            reducer.buckets.choose(Next("plain"))
        assert collectives(fleet) == {"native"}
        ((first, *others),) = results(fleet, 3)
        assert all(torch.equal(first["a"], other["a"]) for other in others)


def test_one_value_that_is_not_finite() -> None:
    with fleet_of(3) as fleet:
        grads = random_grads(3, TENSORS)
        grads[1]["c"][7] = float("inf")
        assert all(bool(found["a"].isnan().all()) for found in fleet.step(grads))
        ((first, *_),) = results(fleet, 3)
        assert bool(first["a"].isfinite().all())


def test_an_abort_amid_a_sum_ends_it_on_every_rank() -> None:
    grads = random_grads(3, TENSORS)
    with fleet_of(3) as fleet:
        for reducer, mine in list(zip(fleet.reducers, grads, strict=True))[:2]:
            for index, name in enumerate(fleet.plan.names()):
                step = reducer.offer(index, mine[name].clone())
        began = time.monotonic()
        fleet.reducers[2].context.transport.abort({"why": "over"})
        for reducer in fleet.reducers[:2]:
            with pytest.raises(ExchangeError):
                reducer.result(0, step)
        assert time.monotonic() - began < 5.0
