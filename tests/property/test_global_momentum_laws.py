"""Global momentum compression: the heavy ball of all ranks, whatever the learning rate does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.dgc import Dgc
from horovod_compress.codecs.work import LAST
from horovod_compress.engine.optimizer.momentum import LastRates, Rates, rates_of
from horovod_compress.errors import ConfigError
from tests.support.local import Fleet, all_same, one_tensor, random_grads, spec

WORLD, COUNT, BETA = 3, 700, 0.75
RATES = [0.1, 0.1, 0.25, 0.0, 0.2, 0.2, 0.02, 0.3]
TENSORS = [spec("big", 40, 5), spec("small", 7)]


def kept(fleet: Fleet, rank: int, kind: str) -> Any:
    return fleet.reducers[rank].buckets[0].memory.state[kind][:COUNT].double().numpy()


@pytest.mark.parametrize("scale", [1.0, float(WORLD)])
def test_the_rule(scale: float) -> None:
    """It goes on with the mean, also where the result is a sum."""
    errors, last = np.zeros((WORLD, COUNT)), np.zeros(COUNT)
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float64)], "gmc", density=0.05, momentum=BETA) as fleet:
        for reducer in fleet.reducers:
            reducer.result_scale = scale
        for step in range(6):
            grads, total = [grad.double() for grad in one_tensor(WORLD, COUNT, seed=step)], np.zeros(COUNT)
            for rank, grad in enumerate(grads):
                x = errors[rank] + BETA * last + grad.numpy()
                at = np.lexsort((np.arange(COUNT), -np.abs(x)))[:35]
                total[at] += x[at]
                x[at] = 0
                errors[rank] = x
            last = total / WORLD
            results = fleet.step([{"w": grad.clone()} for grad in grads])
            assert all_same(results)
            assert np.allclose(results[0]["w"].numpy(), scale * last, rtol=1e-12, atol=1e-13)
            for rank in range(WORLD):
                assert np.allclose(kept(fleet, rank, "residual"), errors[rank], rtol=1e-12, atol=1e-13)
                assert np.allclose(kept(fleet, rank, LAST), BETA * last, rtol=1e-12, atol=1e-13)
                assert (kept(fleet, rank, LAST) == kept(fleet, 0, LAST)).all()


def followers(fleet: Fleet, sgd: torch.optim.SGD, names: Sequence[str]) -> list[Rates]:
    """Return what follows the rate of an optimizer whose only parameter stands for all tensors of every rank."""
    parameter = sgd.param_groups[0]["params"][0]
    pairs = [(reducer.kept, [(name, parameter)]) for reducer in fleet.reducers for name in names]
    return [rates for kept, named in pairs for rates in rates_of(sgd, kept, named, follow_lr=False)]


def heavy_ball(grads: list[Tensor]) -> Tensor:
    """Return where the heavy ball moves weights that begin with 0; a rate of 0 stops it."""
    weights, moved = torch.zeros_like(grads[0]), torch.zeros_like(grads[0])
    for rate, grad in zip(RATES, grads, strict=True):
        moved = BETA * moved - rate * grad if rate else torch.zeros_like(grad)
        weights += moved
    return weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("follows", [True, False])
def test_everything_sent_is_the_heavy_ball_at_any_rate(follows: bool, dtype: torch.dtype) -> None:
    """Of small tensors, too, which are not compressed. Without the rates it is not: the control."""
    tensors = [spec("big", 40, 5, dtype=dtype), spec("small", 7, dtype=dtype)]
    names = ["big", "small"]
    weights = {tensor.name: torch.zeros(tensor.shape, dtype=torch.float64) for tensor in tensors}
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    grads = [random_grads(WORLD, tensors, seed=step) for step in range(len(RATES))]
    means = {name: [sum(mine[name].double() for mine in each) / WORLD for each in grads] for name in names}
    with Fleet(WORLD, tensors, "gmc", density=1.0, momentum=BETA, min_elements=10) as fleet:
        assert [bucket.compressed for bucket in fleet.plan.buckets] == [True, False]
        rates = followers(fleet, sgd, names)
        for rate, each in zip(RATES, grads, strict=True):
            sgd.param_groups[0]["lr"] = rate
            for follower in rates if follows else ():
                follower.begin()
            for name, result in fleet.step(each)[0].items():
                weights[name] -= rate * result.double()
    tolerance = 1e-12 if dtype is torch.float64 else 1e-5
    for name in names:
        expected = heavy_ball(means[name])  # type: ignore[arg-type]
        assert torch.allclose(weights[name], expected, rtol=tolerance, atol=tolerance) == follows


SCHEDULES = {"usual": [0.1, 0.1, 0.25, 0.24, 0.03, 0.029, 0.2], "warm restart": [0.1, 0.03, 0.004, 0.001, 0.1, 0.1]}


@pytest.mark.parametrize("follows", [Rates, LastRates, None])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_waits_is_of_the_heavy_ball_at_any_rate(schedule: str, follows: type[Rates] | None) -> None:
    """What weights have moved by, and the rate times what waits: all that gradients and momentum have given at theirs.

    If only one of the two follows the rate it is not: the controls.
    """
    given, moved, wanted = SCHEDULES[schedule], np.zeros(COUNT), np.zeros(COUNT)
    last: Any = 0.0
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=given[0])
    with Fleet(WORLD, [spec("w", COUNT, dtype=torch.float64)], "gmc", density=0.05, momentum=BETA) as fleet:
        rates = [one for one in followers(fleet, sgd, ["w"]) if follows in (None, type(one))]
        for step, rate in enumerate(given):
            sgd.param_groups[0]["lr"] = rate
            for follower in rates:
                follower.begin()
            grads = [grad.double() for grad in one_tensor(WORLD, COUNT, seed=step)]
            result = fleet.step([{"w": grad.clone()} for grad in grads])[0]["w"].numpy()
            wanted += rate * torch.stack(grads).mean(dim=0).numpy() + BETA * last
            moved, last = moved + rate * result, rate * result
        waits = sum(kept(fleet, rank, "residual") for rank in range(WORLD)) / WORLD
    assert np.abs(waits).max() > 1
    assert np.allclose(moved + given[-1] * waits, wanted, rtol=1e-11, atol=1e-12) == (follows is None)


def test_there_is_nothing_to_mask() -> None:
    assert Dgc(momentum_kind="global").masking and not Dgc(masking=False).masking
    with pytest.raises(ConfigError, match=r"masking=False is for momentum_kind=\"local\""):
        Dgc(momentum_kind="global", masking=False)


def test_a_rate_that_falls_far_and_rises_again_does_no_harm() -> None:
    """What is not sent waits: momentum that was made for a tiny rate would be applied at the usual one."""
    tensor, weights = spec("w", COUNT), torch.ones(COUNT)
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    with Fleet(WORLD, [tensor], "gmc", density=0.05, momentum=0.5) as fleet:
        rates = followers(fleet, sgd, ["w"])
        for step, rate in enumerate([0.02] * 30 + [1e-9] * 3 + [0.02] * 60):
            sgd.param_groups[0]["lr"] = rate
            for follower in rates:
                follower.begin()
            noise = [0.1 * grad for grad in one_tensor(WORLD, COUNT, seed=step)]
            weights -= rate * fleet.step([{"w": weights + one} for one in noise])[0]["w"]
    assert weights.norm() < torch.ones(COUNT).norm()


def test_a_step_that_is_not_finite_leaves_no_trace() -> None:
    with Fleet(WORLD, TENSORS, "gmc", density=0.1, momentum=BETA, min_elements=10) as fleet:
        fleet.step(random_grads(WORLD, TENSORS, seed=1))
        before = {name: tensor.clone() for name, tensor in fleet.reducers[0].kept.states()[LAST].items()}
        grads = random_grads(WORLD, TENSORS, seed=2)
        grads[1]["big"][0, 0] = grads[2]["small"][0] = torch.inf
        assert fleet.step(grads)[0]["big"].isnan().all()
        after = fleet.reducers[0].kept.states()[LAST]
        assert before.keys() == {"big", "small"}
        assert all(torch.equal(after[name], before[name]) for name in before)
