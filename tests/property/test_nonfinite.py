"""NaN and infinity have one fate, whichever rank has them: every rank sees it, nobody remembers it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.errors import NonFiniteError
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec

WORLD = 3
TENSORS = [spec("b", 70), spec("a", 5, 40)]
METHODS = ["none", "fp16", "bf16", "marsit", "global_qsgd"]
BAD = [math.nan, math.inf, -math.inf]


def _fleet(method: str, **options: Any) -> Fleet:
    own = {"full_precision_every": 4, "compensation": "global"} if method == "marsit" else {}
    return Fleet(WORLD, TENSORS, method, **{"schedule": "layerwise"} | own | options)


def _spoilt(grads: list[dict[str, Tensor]], rank: int, value: float, name: str = "a") -> list[dict[str, Tensor]]:
    grads = [{n: grad.clone() for n, grad in mine.items()} for mine in grads]
    grads[rank][name].view(-1)[17] = value
    return grads


def _same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return all(same_bits(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)


@pytest.mark.parametrize("exchange", ["ring", "fold"])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("at", [4, 6])  # a full-precision round of Marsit and a compressed one
def test_one_bucket_is_nan_everywhere_and_leaves_no_trace(
    at: int, method: str, rank: int, value: float, exchange: str
) -> None:
    with _fleet(method, exchange=exchange) as hurt, _fleet(method, exchange=exchange) as healthy:
        for number in range(at):
            grads = random_grads(WORLD, TENSORS, seed=number)
            hurt.step(grads), healthy.step(grads)
        before = hurt.residuals()
        good = random_grads(WORLD, TENSORS, seed=at)
        results, usual = hurt.step(_spoilt(good, rank, value)), healthy.step(good)
        after = hurt.residuals()
        for mine, fine, old, new in zip(results, usual, before, after):
            assert bool(mine["a"].isnan().all())
            assert same_bits(mine["b"], fine["b"]) and bool(mine["b"].isfinite().all())
            assert all(same_bits(old[name], new[name]) for name in old if name == "a")
        assert [reducer.metrics.nonfinite for reducer in hurt.reducers] == [1] * WORLD


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize("compensation", ["global", "own"])
def test_later_steps_equal_a_run_that_never_saw_it(compensation: str, rank: int) -> None:
    options = dict(schedule="single", full_precision_every=0, compensation=compensation)
    with _fleet("marsit", **options) as hurt, _fleet("marsit", **options) as healthy:
        for number in range(3):
            grads = random_grads(WORLD, TENSORS, seed=number)
            hurt.step(grads), healthy.step(grads)
        hurt.step(_spoilt(random_grads(WORLD, TENSORS, seed=99), rank, math.nan))
        healthy.resume(4)  # the same step number, so the same random bits
        for number in range(4, 7):
            grads = random_grads(WORLD, TENSORS, seed=number)
            assert _same(hurt.step(grads), healthy.step(grads))
        assert _same(hurt.residuals(), healthy.residuals())
        assert any(bool(r.any()) for r in hurt.residuals()[0].values())


@pytest.mark.parametrize("rank", range(WORLD))
def test_raise_names_rank_and_parameter_on_every_rank(rank: int) -> None:
    with _fleet("marsit", nonfinite="raise") as fleet:
        fleet.step(random_grads(WORLD, TENSORS))
        kept = fleet.residuals()
        step = fleet.offer(_spoilt(random_grads(WORLD, TENSORS, seed=1), rank, math.inf))
        for reducer in fleet.reducers:
            assert bool(reducer.result(fleet._index["b"], step).isfinite().all())
            with pytest.raises(NonFiniteError) as caught:
                reducer.result(fleet._index["a"], step)
            text = str(caught.value)
            assert f"rank {reducer.rank}:" in text and f"the first on rank {rank}" in text
            assert "step 1" in text and "bucket 1" in text
            assert ("on this rank in a" in text) == (reducer.rank == rank)
        assert all(same_bits(old["a"], new["a"]) for old, new in zip(kept, fleet.residuals()))
        # It is over with that step.
        assert all_same(fleet.step(random_grads(WORLD, TENSORS, seed=2)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", BAD)
def test_zero_counts_them_as_zero(method: str, value: float) -> None:
    grads = random_grads(WORLD, TENSORS, seed=5)
    with _fleet(method, nonfinite="zero") as hurt, _fleet(method) as healthy:
        for number in range(6):
            grads = random_grads(WORLD, TENSORS, seed=number)
            results = hurt.step(_spoilt(grads, 1, value))
            assert _same(results, healthy.step(_spoilt(grads, 1, 0.0)))
        assert _same(hurt.residuals(), healthy.residuals())


@pytest.mark.parametrize("method", METHODS)
def test_odd_but_finite_numbers_are_not_counted(method: str) -> None:
    tensors = [spec("a", 64)]
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e4, -3e4, 1.0] * 8)
    own = {"full_precision_every": 2, "compensation": "global"} if method == "marsit" else {}
    with Fleet(2, tensors, method, **own) as fleet:
        for _ in range(4):
            results = fleet.step([{"a": odd}, {"a": odd.flip(0)}])
            assert all_same(results) and bool(results[0]["a"].isfinite().all())
        assert fleet.reducers[0].metrics.nonfinite == 0


def test_counts_of_all_ranks_add_up() -> None:
    with _fleet("marsit", schedule="single") as fleet:
        grads = _spoilt(_spoilt(random_grads(WORLD, TENSORS), 2, math.nan), 1, math.inf, "b")
        results = fleet.step(grads)
        assert all(bool(mine[name].isnan().all()) for mine in results for name in mine)
        assert [reducer.metrics.nonfinite for reducer in fleet.reducers] == [2] * WORLD
