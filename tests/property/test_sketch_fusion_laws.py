"""Sketch-Fusion against its rule, with dense arithmetic in the place of sketches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.sketch_fusion import SketchFusion
from horovod_compress.errors import ConfigError
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


def test_options() -> None:
    for options in ({"density": 0}, {"cells": 0}, {"cells": 5}, {"rows": 2}, {"rows": True}, {"candidates": 0},
                    {"momentum": 1}, {"momentum": -0.1}, {"error_feedback": "none"}, {"density": True}):  # fmt: skip
        with pytest.raises(ConfigError):
            SketchFusion(**options)
