"""Gradients that are divided before they are encoded: as if they had been divided beforehand, whoever divides."""

from __future__ import annotations

import pytest
import torch

from horovod_compress.engine.reducer import Next
from tests.battery.cases import each_case
from tests.battery.kept import kept_by, same
from tests.support.local import Fleet, random_grads, spec
from tests.support.samples import Sample

WORLD = 3
NAMES = {"a", "b", "c"}


@each_case(lambda codec: codec.properties().divides == "before")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("held", [NAMES, {"a", "c"}], ids=["all", "some"])
def test_results_are_those_of_gradients_that_were_divided(case: Sample, dtype: torch.dtype, held: set[str]) -> None:
    tensors = [spec("a", 40, 50, dtype=dtype), spec("b", 701, dtype=dtype), spec("c", 90, 20, dtype=dtype)]
    sizes = random_grads(1, tensors, seed=99)[0]
    by = {name: sizes[name].view(-1).abs() + 0.1 for name in held}
    with case.fleet(WORLD, tensors) as mine, case.fleet(WORLD, tensors) as other:
        for number in range(3):
            grads = random_grads(WORLD, tensors, seed=number)
            divided = [{n: g / by[n].view_as(g) if n in by else g for n, g in one.items()} for one in grads]
            for fleet in (mine, other):
                _hold(fleet)
            for reducer in mine.reducers:
                reducer.buckets.divide_by(by)
            results, expected = mine.step(grads), other.step(divided)
            for found, wanted in zip(results, expected, strict=True):
                for name, result in found.items():
                    again = wanted[name] * by[name].view_as(result) if name in by else wanted[name]
                    assert torch.equal(result, again), name
            kept = [[kept_by(reducer, NAMES) for reducer in fleet.reducers] for fleet in (mine, other)]
            assert same(*kept)


def _hold(fleet: Fleet) -> None:
    """Let the coming step be a compressed one."""
    for reducer in fleet.reducers:
        reducer.buckets.choose(Next("coded"))
