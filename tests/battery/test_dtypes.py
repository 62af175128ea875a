"""Gradients of every type, with gaps in memory or without: results are the gradients themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.battery.cases import each_case
from tests.battery.kept import kept, same
from tests.support.local import all_same, random_grads, spec
from tests.support.marks import each_value
from tests.support.samples import Sample

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def _odd(grad: Tensor) -> Tensor:
    """Return the same values in memory that is not contiguous."""
    if grad.dim() == 4:
        return grad.contiguous(memory_format=torch.channels_last)
    gaps = torch.zeros(2 * grad.numel(), dtype=grad.dtype)[::2]
    gaps.copy_(grad)
    return gaps


@each_value
@each_case()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_type_and_layout_in_memory(case: Sample, dtype: torch.dtype) -> None:
    """Results overwrite the gradients, in their type and shape; memory with gaps changes no bit."""
    tensors = [spec("a", 4, 6, 5, 3, dtype=dtype), spec("b", 50, dtype=dtype)]
    found = {}
    for odd in (False, True):
        with case.fleet(2, tensors) as fleet:
            for number in range(3):
                grads = random_grads(2, tensors, seed=number)
                if odd:
                    grads = [{n: _odd(g) for n, g in mine.items()} for mine in grads]
                    assert not any(g.is_contiguous() for mine in grads for g in mine.values())
                step = fleet.offer(grads)
                results = [{n: r.result(fleet._index[n], step) for n in grads[0]} for r in fleet.reducers]
                assert all(mine[n] is given[n] for mine, given in zip(results, grads, strict=True) for n in mine)
                assert all(results[0][t.name].dtype is dtype for t in tensors)
                assert all(results[0][t.name].shape == t.shape for t in tensors)
                assert all(bool(result.isfinite().all()) for result in results[0].values())
                assert all_same(results)
            found[odd] = results + kept(fleet)
    assert same(found[False], found[True])


@each_case()
def test_types_side_by_side(case: Sample) -> None:
    """A model of several types: each has buckets of its own."""
    tensors = [spec(str(dtype), 300, dtype=dtype) for dtype in DTYPES]
    with case.fleet(3, tensors) as fleet:
        assert len(fleet.plan.buckets) == len(DTYPES)
        for number in range(2):
            results = fleet.step(random_grads(3, tensors, seed=number))
            assert all_same(results) and all(str(result.dtype) == name for name, result in results[0].items())
