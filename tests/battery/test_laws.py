"""What a method's law promises holds; every check is shown to fail where it should."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs.base import Codec
from tests.battery.cases import each_case
from tests.battery.kept import empty
from tests.support.local import Fleet, one_tensor, random_grads, spec
from tests.support.marks import each_value
from tests.support.samples import ANY_BUCKET, KINDS, Sample

WORLD = 3
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


# ---- nothing is lost ----


@each_value
@each_case(lambda codec: codec.properties().law.conserves)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_sent_is_kept(case: Sample, dtype: torch.dtype) -> None:
    """result + mean residual' = mean (gradient + residual), but for one rounding for each operation."""
    tensors = [spec("a", 9, 40, dtype=dtype), spec("b", 65, dtype=dtype)]
    unit = max(case.codec().properties().law.epsilon, torch.finfo(dtype).eps)
    for world in case.worlds(1, 2, 4):
        with case.fleet(world, tensors) as fleet:
            for number in range(5):
                grads, before = random_grads(world, tensors, seed=number), _residuals(fleet)
                results, after = fleet.step(grads), _residuals(fleet)
                for tensor in tensors:
                    gradient = torch.stack([mine[tensor.name].double() for mine in grads])
                    x = gradient + before[tensor.name].view(gradient.shape)
                    rest = after[tensor.name].view(gradient.shape)
                    result = results[0][tensor.name].double()
                    size = x.abs().mean(0) + result.abs() + rest.abs().mean(0)
                    wrong = (result + rest.mean(0) - x.mean(0)).abs()
                    assert bool((wrong <= (world + 3) * unit * size).all()), float((wrong / size).max() / unit)


@each_case(lambda codec: codec.properties().law.conserves and bool(codec.layout(ANY_BUCKET, 1).state))
def test_the_residual_is_what_keeps_it(case: Sample) -> None:
    """The control: the sum does not come out without the residuals, neither those before nor those after."""
    tensors = [spec("a", 9, 40)]
    worst = [0.0, 0.0]
    with case.fleet(WORLD, tensors) as fleet:
        for number in range(5):
            grads, before = random_grads(WORLD, tensors, seed=number), _residuals(fleet)["a"].view(WORLD, 9, 40)
            result, after = fleet.step(grads)[0]["a"].double(), _residuals(fleet)["a"].view(WORLD, 9, 40)
            gradient = torch.stack([mine["a"].double() for mine in grads])
            without = (gradient.mean(0) - result - after.mean(0), (gradient + before).mean(0) - result)
            worst = [max(worst[i], float(wrong.abs().max())) for i, wrong in enumerate(without)]
    assert min(worst) > 0.01


def _residuals(fleet: Fleet) -> dict[str, Tensor]:
    """Return the residuals of all ranks, by tensor; zeros where a method has none."""
    found = [reducer.kept.residuals() for reducer in fleet.reducers]
    return {
        t.name: torch.stack([mine.get(t.name, torch.zeros(t.count)).double() for mine in found]) for t in fleet.tensors
    }


# ---- the expectation ----


def _draws(case: Sample, grads: list[Tensor], number: int) -> Tensor:
    """Return results of the same gradients with other random bits, without memory of each other."""
    found = []
    with case.fleet(len(grads), [spec("w", grads[0].numel())], verify_every=0) as fleet:
        for _ in range(number):
            found.append(fleet.step([{"w": grad} for grad in grads])[0]["w"].double())
            empty(fleet)
    return torch.stack(found)


@each_case(lambda codec: codec.properties().law.unbiased, quick=set(KINDS) - {"none"})  # as fp16, without rounding
def test_unbiased(case: Sample) -> None:
    """The mean of many draws is the mean of the ranks, within 5 standard errors and the rounding.

    The standard error of a value is at least that of the bucket: where a level is seldom drawn the draws
    say little of its variance.
    """
    number, grads = 400, one_tensor(WORLD, 300, seed=5)
    draws, exact = _draws(case, grads, number), torch.stack(grads).double()
    spread = draws.var(0)
    error = spread.maximum(spread.mean()).sqrt() / math.sqrt(number)
    limit = 5 * error + (WORLD + 2) * case.codec().properties().law.epsilon * exact.abs().mean(0)
    assert bool(((draws.mean(0) - exact.mean(0)).abs() <= limit).all())
    # The control: the limit is tight enough to tell the mean from that without the last rank.
    assert bool(((draws.mean(0) - exact[:-1].mean(0)).abs() > limit).any())


def _bounded(codec: Codec) -> bool:
    error = codec.properties().law.error
    return error is not None and error([torch.ones(8, dtype=torch.float64)] * WORLD) is not None


def _spiky(count: int) -> list[Tensor]:
    """Return small numbers beside a few large ones."""
    grads = one_tensor(WORLD, count, seed=6)
    for rank, grad in enumerate(grads):
        grad[count // 8 :] *= 1e-2
        grad[rank] = 30.0
    return grads


@each_value
@each_case(_bounded)
@pytest.mark.parametrize("kind", ["normal", "spiky"])
def test_the_squared_error_is_bounded(case: Sample, kind: str) -> None:
    """The mean over 200 draws is at most the bound, with 3 % for chance."""
    grads = one_tensor(WORLD, 2100, seed=7) if kind == "normal" else _spiky(2100)
    exact = [grad.double() for grad in grads]
    error = case.codec().properties().law.error
    bound = error and error(exact)
    assert bound is not None and math.isfinite(bound)
    error = float(((_draws(case, grads, 200) - torch.stack(exact).mean(0)) ** 2).sum(1).mean())
    assert error <= 1.03 * bound
    # A bound that would allow a result of zero says nothing, unless little can be said of these options.
    assert bound < 100 * float(torch.stack(exact).pow(2).sum())
