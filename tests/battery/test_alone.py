"""One rank that is left of a larger job has its gradients back, with what waited; then others come again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.reducer import Hooks
from horovod_compress.engine.saved import checkpoint
from horovod_compress.engine.saved.redistribute import redistributed
from tests.battery.cases import EVERY, each_case
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.samples import Sample

TENSORS = [spec("a", 9, 30), spec("b", 70), spec("half", 8, 16, dtype=torch.float16)]
STEPS = 3


def load(fleet: Fleet, states: Sequence[Mapping[str, Any]]) -> None:
    methods = fleet.methods
    for rank, reducer in enumerate(fleet.reducers):
        state = redistributed(states, rank, fleet.world, methods.folded(), methods.coded())
        checkpoint.load(reducer, methods, state, "restore")


def save(fleet: Fleet) -> list[dict[str, Any]]:
    return [checkpoint.save(reducer, fleet.methods) for reducer in fleet.reducers]


def owed(state: Mapping[str, Mapping[str, Tensor]], tensor: str, shape: torch.Size) -> Tensor:
    """Return what one rank has not had yet."""
    kinds = [kind for kind in ("residual", "server") if kind in state]
    return sum((state[kind][tensor].double().view(shape) for kind in kinds), torch.zeros(shape, dtype=torch.float64))


@each_case(quick=EVERY)
def test_one_rank_has_its_gradients_and_what_waits(case: Sample) -> None:
    world = case.worlds(2, 3)[0]
    with case.fleet(world, TENSORS, schedule="layerwise") as several:
        for seed in range(STEPS):
            several.step(random_grads(world, TENSORS, seed=seed))
        states = save(several)
    with case.fleet(1, TENSORS, schedule="layerwise", hooks=Hooks(exact_alone=True)) as alone:
        load(alone, states)
        waited = save(alone)[0]["state"]
        for step in range(STEPS):
            ((grads,), (results,)) = (found := random_grads(1, TENSORS, seed=9 + step)), alone.step(found)
            for name, grad in grads.items():
                expected = grad if step else (grad.double() + owed(waited, name, grad.shape)).to(grad.dtype)
                if step:
                    assert same_bits(results[name], expected), name
                torch.testing.assert_close(results[name], expected, rtol=1e-3 if name == "half" else 1e-6, atol=1e-6)
        states = save(alone)
        assert not any(bool(tensor.any()) for kept in states[0]["state"].values() for tensor in kept.values())
    with case.fleet(world, TENSORS, schedule="layerwise") as several:
        load(several, states)
        assert all_same(several.step(random_grads(world, TENSORS, seed=20)))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", ["topk", "onebit", "qsgd"])
def test_elsewhere_one_rank_is_compressed_as_several_are(method: str, exact: bool) -> None:
    """The control: other frameworks hand gradients over with one rank from the beginning, which measures a method."""
    (grads,) = found = random_grads(1, TENSORS, seed=1)
    with Fleet(1, TENSORS, method, schedule="layerwise", hooks=Hooks(exact_alone=exact)) as fleet:
        (results,) = fleet.step(found)
    assert exact == all(same_bits(results[name], grad) for name, grad in grads.items())
