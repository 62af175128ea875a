"""Sketch-Fusion against its rule, with dense arithmetic in the place of sketches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from horovod_compress.codecs.sketch_fusion import SketchFusion
from horovod_compress.errors import ConfigError
from horovod_compress.ops.keys import SKETCH, Key
from horovod_compress.schedule.plan import Plan
from tests.support.local import Fleet, all_same, one_tensor, random_grads, same_bits, spec

WIDE = {"cells": 4.0, "rows": 5}


def sparse(count: int, support: Tensor, seed: int) -> Tensor:
    values = torch.randn(len(support), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.zeros(count, dtype=torch.float64).index_copy_(0, support, values + values.sign())


@pytest.mark.parametrize("feedback", ["dense", "sketch"])
def test_what_fits_is_recovered_exactly(feedback: str) -> None:
    """Few values in a wide table: all are found, and nothing is left over."""
    count, world = 20_000, 3
    support = torch.randperm(count, generator=torch.Generator().manual_seed(1))[:100]
    grads = [sparse(count, support, seed) for seed in range(world)]
    options = {"density": 0.005, "candidates": 1, "error_feedback": feedback} | WIDE
    with Fleet(world, [spec("a", count, dtype=torch.float64)], "sketch_fusion", **options) as fleet:
        results = fleet.step([{"a": grad} for grad in grads])
        assert all_same(results)
        assert torch.allclose(results[0]["a"], sum(grads) / world, rtol=1e-9, atol=1e-12)
        assert all(not kept["a"].any() for kept in fleet.residuals() if kept)
        for reducer in fleet.reducers:
            assert all(float(table.abs().max()) < 1e-12 for table in reducer.kept.tables().values())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_are_those_of_the_rule_at_the_positions_found(momentum: float) -> None:
    """u, v, z and the zeroing, by hand; where the largest values are is taken from the result."""
    count, world, k = 3_000, 2, 150
    options = {"density": k / count, "momentum": momentum, "candidates": 3} | WIDE
    u = [torch.zeros(count, dtype=torch.float64) for _ in range(world)]
    v = [torch.zeros(count, dtype=torch.float64) for _ in range(world)]
    with Fleet(world, [spec("a", count, dtype=torch.float64)], "sketch_fusion", **options) as fleet:
        for step in range(4):
            grads = one_tensor(world, count, seed=step, dtype=torch.float64)
            result = fleet.step([{"a": grad} for grad in grads])[0]["a"]
            for rank in range(world):
                u[rank] = momentum * u[rank] + grads[rank]
                v[rank] = v[rank] + u[rank]
            chosen = result != 0
            assert int(chosen.sum()) == k
            mean = sum(v) / world
            assert torch.allclose(result[chosen], mean[chosen], rtol=1e-12)
            # The sketch need not find the k largest, but it must be close to them.
            best = mean.abs().topk(k).values.square().sum()
            assert float(result.square().sum() / best) > 0.8
            for rank, reducer in enumerate(fleet.reducers):
                v[rank][chosen] = u[rank][chosen] = 0
                states = reducer.kept.states()
                assert torch.allclose(states["residual"]["a"], v[rank], rtol=1e-12, atol=1e-15)
                assert ("momentum" in states) == bool(momentum)
                if momentum:
                    assert torch.allclose(states["momentum"]["a"], u[rank], rtol=1e-12, atol=1e-15)


def test_more_cells_find_larger_values() -> None:
    """The control of the sketch: one that is far too small chooses all but at random."""
    count, found = 50_000, []
    x = one_tensor(1, count, dtype=torch.float64)[0] ** 3
    for cells in (0.002, 0.1, 1.0):
        with Fleet(1, [spec("a", count, dtype=torch.float64)], "sketch_fusion", density=0.01, cells=cells) as fleet:
            result = fleet.step([{"a": x}])[0]["a"]
        found.append(float(result.square().sum() / x.abs().topk(500).values.square().sum()))
    assert found[0] < 0.5 * found[1] < 0.5 < 0.9 < found[2] <= 1


def test_gaps_between_tensors_are_never_chosen() -> None:
    tensors = [spec(f"t{number}", 1) for number in range(40)]
    with Fleet(2, tensors, "sketch_fusion", density=1.0) as fleet:
        for step in range(3):
            grads = random_grads(2, tensors, seed=step)
            results = fleet.step(grads)
            for tensor in tensors:  # density 1: everything that is read as other than 0 is sent
                mean = (grads[0][tensor.name] + grads[1][tensor.name]) / 2
                assert torch.allclose(results[0][tensor.name], mean, rtol=1e-6)


def test_hashes_change_with_the_step_where_nothing_forbids_it() -> None:
    """Tables of different steps are added in the sketch only; else two elements would collide for ever."""
    count, chosen = 10_000, {}
    x = one_tensor(1, count, dtype=torch.float64)[0]
    for feedback in ("dense", "sketch"):
        found = []
        for step in (0, 5):
            with Fleet(1, [spec("a", count, dtype=torch.float64)], "sketch_fusion", error_feedback=feedback) as fleet:
                fleet.resume(step)
                found.append(fleet.step([{"a": x}])[0]["a"])
        chosen[feedback] = same_bits(*found)
    assert chosen == {"dense": False, "sketch": True}


# ---- tables in other buckets ----

COUNTS = (6_000, 6_000, 8_000)
PARTS = [spec(f"p{number}", count, dtype=torch.float64) for number, count in enumerate(COUNTS)]


def _in_parts(x: Tensor) -> dict[str, Tensor]:
    return {part.name: piece.clone() for part, piece in zip(PARTS, x.split(COUNTS), strict=True)}


def _whole(results: dict[str, Tensor]) -> Tensor:
    return torch.cat([results[part.name] for part in PARTS])


def _replan(fleet: Fleet, *buckets: Sequence[int]) -> None:
    fleet.plan = Plan.of([([PARTS[number] for number in bucket], 1) for bucket in buckets])
    for reducer in fleet.reducers:
        reducer.replan(fleet.plan)
    fleet._index = {name: index for index, name in enumerate(fleet.plan.names())}


def _tables(fleet: Fleet) -> list[dict[str, Tensor]]:
    return [{name: table.clone() for name, table in r.kept.tables().items()} for r in fleet.reducers]


def _set_tables(fleet: Fleet, tables: Sequence[dict[str, Tensor]], factor: float = 1.0) -> None:
    for reducer, mine in zip(fleet.reducers, tables, strict=True):
        for name, table in reducer.kept.tables().items():
            table.copy_(mine[name] * factor)


@pytest.mark.parametrize("fault", [None, "emptied", "as they were"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_what_waits_in_tables_is_sent_from_other_buckets(momentum: float, fault: str | None) -> None:
    """More values than a step sends: some wait, buckets change, and they come as they would have. Faults: controls."""
    support = torch.randperm(sum(COUNTS), generator=torch.Generator().manual_seed(1))[:200]
    grads = [_in_parts(sparse(sum(COUNTS), support, seed)) for seed in range(2)]
    nothing, bad = ([_in_parts(torch.full((sum(COUNTS),), x, dtype=torch.float64))] * 2 for x in (0.0, math.nan))
    options, sums = {"density": 0.0075, "momentum": momentum, "error_feedback": "sketch"} | WIDE, []
    for changes in ([], [[(0, 1, 2)], [(0,), (1, 2)], [(1,), (0,), (2,)]]):
        with Fleet(2, PARTS, "sketch_fusion", schedule="layerwise", **options) as fleet:
            total, before = _whole(fleet.step(grads)[0]), _tables(fleet)
            for buckets in changes:
                _replan(fleet, *buckets)
                assert all_same(_tables(fleet))
            if changes and fault:
                _set_tables(fleet, before, 0.0 if fault == "emptied" else 1.0)
            tables = _tables(fleet)
            assert _whole(fleet.step(bad)[1]).isnan().all() and all_same([*tables, *_tables(fleet)])
            for _ in range(3):
                total += _whole(fleet.step(nothing)[0])
            sums.append(total)
    assert torch.allclose(*sums, rtol=1e-9, atol=1e-12) == (not fault)
    if not momentum:
        mean = sum(_whole(grad) for grad in grads) / 2
        assert torch.allclose(sums[1], mean, rtol=1e-9, atol=1e-12) == (not fault)


def _key(index: int) -> Key:
    return Key(0, 0, index, 0, purpose=SKETCH)


def _readings(fleet: Fleet) -> Tensor:
    """Return what is read from the error tables for every element."""
    found, tables = {}, fleet.reducers[0].kept.tables()
    for bucket in fleet.plan.buckets:
        for tensor, start in zip(bucket.tensors, bucket.offsets, strict=True):
            at, values = torch.zeros(tensor.count, dtype=torch.int64), torch.zeros(tensor.count, dtype=torch.float64)
            spans = [(start, tensor.count)]
            number = ops.sketch_top(tables[f"{bucket.index} error"], 5, _key(bucket.index), spans, len(at), at, values)
            whole = torch.zeros(tensor.count, dtype=torch.float64)
            found[tensor.name] = whole.index_copy_(0, at[:number] - start, values[:number])
    return _whole(found)


def _error(found: Tensor, wanted: Tensor) -> float:
    """Return the squared error at the largest readings of two buckets, as a share of their squares."""
    error, size = 0.0, 0.0
    for new, old in zip(found.split(COUNTS)[1:], wanted.split(COUNTS)[1:], strict=True):
        largest = old.abs().topk(old.numel() // 20).indices
        error, size = error + float((new - old)[largest].square().sum()), size + float(old[largest].square().sum())
    return error / size


def test_the_largest_values_are_carried_and_a_bucket_that_stays_keeps_every_bit() -> None:
    options = {"density": 0.05, "cells": 0.5, "error_feedback": "sketch", "seed": 0}
    with Fleet(2, PARTS, "sketch_fusion", schedule="layerwise", **options) as fleet:
        for step in range(5):
            grads = [one_tensor(1, sum(COUNTS), 2 * step + rank, torch.float64)[0] ** 3 for rank in range(2)]
            fleet.step([_in_parts(grad) for grad in grads])
        wanted, staying = _readings(fleet), fleet.reducers[0].kept.tables()["0 error"].clone()
        _replan(fleet, (0,), (1, 2))
        bucket, tables = fleet.plan.buckets[1], fleet.reducers[0].kept.tables()
        assert same_bits(tables["0 error"], staying)
        assert _error(_readings(fleet), wanted) < 0.1
        tables["1 error"].zero_()  # with all that is read, more would be noise
        for part, start in zip(wanted.split(COUNTS)[1:], bucket.offsets, strict=True):
            ops.sketch_encode(part.contiguous(), None, tables["1 error"], 5, _key(1), offset=start)
        assert _error(_readings(fleet), wanted) > 0.2


def test_options() -> None:
    for options in ({"density": 0}, {"cells": 0}, {"cells": 5}, {"rows": 2}, {"rows": True}, {"candidates": 0},
                    {"momentum": 1}, {"momentum": -0.1}, {"error_feedback": "none"}, {"density": True}):  # fmt: skip
        with pytest.raises(ConfigError):
            SketchFusion(**options)
