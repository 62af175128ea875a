"""Whole steps on a GPU give the bits of those on the CPU, given equal gradients: results, and what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.battery.cases import EVERY, each_case
from tests.battery.kept import Kept, kept, same
from tests.support.local import random_grads, spec
from tests.support.samples import Sample

TENSORS = [
    spec("a", 70, 336),
    spec("b", 5),
    spec("empty", 0),
    spec("c", 9001),
    spec("y", 129, dtype=torch.float16),
    spec("e"),
]
LARGE = [spec("a", 1200, 700), spec("b", 700)]
STEPS = 3
#: What payloads are merged with is in host memory, as they are when they meet: these are staged there.
ON_HOST = ("server of ", "carry ")

pytestmark = pytest.mark.gpu


def _run(case: Sample, world: int, tensors: list, device: str, spoilt: int, **options: Any) -> tuple[list[Kept], Kept]:
    there = [replace(tensor, device=device) for tensor in tensors]
    with case.fleet(world, there, **options) as fleet:
        results = []
        for number in range(STEPS):
            grads = random_grads(world, tensors, seed=number)
            if number == spoilt:
                grads[1]["a"].view(-1)[3] = float("nan")
            moved = [{name: grad.to(device) for name, grad in mine.items()} for mine in grads]
            found = fleet.step(moved)
            results.append([{name: grad.cpu() for name, grad in mine.items()} for mine in found])
        for reducer in fleet.reducers:
            assert reducer.wait_idle(20.0)
        left, where = kept(fleet), torch.device(device).type
        elsewhere = {name for mine in left for name, tensor in mine.items() if tensor.device.type != where}
        assert all(name.startswith(ON_HOST) for name in elsewhere)
        return results, [{name: tensor.cpu() for name, tensor in mine.items()} for mine in left]


def _check(case: Sample, world: int, tensors: list, spoilt: int = -1, **options: Any) -> None:
    torch.cuda.set_device(0)
    results, left = _run(case, world, tensors, "cpu", spoilt, **options)
    there, left_there = _run(case, world, tensors, "cuda:0", spoilt, **options)
    assert all(same(a, b) for a, b in zip(results, there, strict=True)) and same(left, left_there)


@each_case(quick=EVERY)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_steps(case: Sample, world: int) -> None:
    for exchange in case.exchanges() if world in case.worlds(world) else []:
        _check(case, world, TENSORS, exchange=exchange)


@each_case(quick=EVERY)
def test_steps_in_parts(case: Sample) -> None:
    """Buckets large enough to be encoded and decoded in parts."""
    _check(case, 2, LARGE)


@each_case(quick=EVERY)
def test_values_that_are_not_finite(case: Sample) -> None:
    _check(case, 2, TENSORS, spoilt=1, timeout=20.0)


@each_case(quick=EVERY)
@pytest.mark.parametrize("nonfinite", ["zero"])
def test_values_that_count_as_zero(case: Sample, nonfinite: str) -> None:
    _check(case, 2, TENSORS, spoilt=1, nonfinite=nonfinite)
