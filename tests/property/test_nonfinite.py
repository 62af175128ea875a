"""How values that are not finite are told: which rank, which parameter, how many.

What becomes of them is tested for every method, see tests/battery.
"""

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


def _fleet(method: str, **options: Any) -> Fleet:
    own = {"full_precision_every": 4, "compensation": "global"} if method == "marsit" else {}
    return Fleet(WORLD, TENSORS, method, **{"schedule": "layerwise"} | own | options)


def _spoilt(grads: list[dict[str, Tensor]], rank: int, value: float, name: str = "a") -> list[dict[str, Tensor]]:
    grads = [{n: grad.clone() for n, grad in mine.items()} for mine in grads]
    grads[rank][name].view(-1)[17] = value
    return grads


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
        assert all(same_bits(old["a"], new["a"]) for old, new in zip(kept, fleet.residuals(), strict=True))
        # It is over with that step.
        assert all_same(fleet.step(random_grads(WORLD, TENSORS, seed=2)))


@pytest.mark.parametrize("choice", ["propagate", "zero"])
def test_counts_of_all_ranks_add_up(choice: str) -> None:
    with _fleet("marsit", schedule="single", nonfinite=choice) as fleet:
        grads = _spoilt(_spoilt(random_grads(WORLD, TENSORS), 2, math.nan), 1, math.inf, "b")
        results = fleet.step(grads)
        looks = torch.isnan if choice == "propagate" else torch.isfinite
        assert all(bool(looks(mine[name]).all()) for mine in results for name in mine)
        assert [reducer.metrics.nonfinite for reducer in fleet.reducers] == [2] * WORLD


def test_values_that_are_too_large_are_counted_as_zeros_too() -> None:
    """One that is not finite hides none that a method of signs cannot take, and no step is counted again."""
    with _fleet("marsit", schedule="single", nonfinite="zero", full_precision_every=0) as fleet:
        grads = _spoilt(_spoilt(random_grads(WORLD, TENSORS), 2, math.nan), 2, 3e38, "b")
        assert all(bool(grad.isfinite().all()) for mine in fleet.step(grads) for grad in mine.values())
        fleet.step(random_grads(WORLD, TENSORS, seed=1))
        assert [reducer.metrics.nonfinite for reducer in fleet.reducers] == [2] * WORLD
