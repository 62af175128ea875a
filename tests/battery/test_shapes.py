"""Lengths at the edges of words, blocks and chunks; buckets with gaps; inputs that are out of the ordinary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.battery.cases import each_case
from tests.battery.kept import kept
from tests.support.local import all_same, random_grads, spec
from tests.support.marks import each_value
from tests.support.samples import FEW, Sample

LENGTHS = [0, 1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 2**14 - 1, 2**14, 2**14 + 1]
EDGES = [spec(f"of {count}", count) for count in LENGTHS] + [spec("scalar")]
ONES = [spec(f"one {number}", *shape) for number, shape in enumerate([(), (1,), (1, 1), (1,), ()])]
GAPS = [spec("long", 700), spec("empty", 0), spec("rows", 5, 33), spec("scalar"), spec("cube", 2, 3, 4, 5)]
WORLD = 3


@each_case(quick=FEW)
def test_lengths(case: Sample) -> None:
    """Every edge length in a bucket of its own, and all in one bucket with gaps between them."""
    for world in case.worlds(1, 2, 3):
        for schedule, tensors in [("layerwise", EDGES), ("single", EDGES), ("single", ONES), ("single", GAPS)]:
            with case.fleet(world, tensors, schedule=schedule) as fleet:
                for number in range(2):
                    results = fleet.step(random_grads(world, tensors, seed=number))
                    assert all_same(results)
                    assert all(results[0][t.name].shape == t.shape for t in tensors)
                    assert all(bool(result.isfinite().all()) for result in results[0].values())


@each_value
@each_case()
@pytest.mark.parametrize("kind", ["empty", "one element"])
def test_a_bucket_of_almost_nothing(case: Sample, kind: str) -> None:
    """More ranks than elements."""
    tensors = [spec("a", 0 if kind == "empty" else 1)]
    for world in case.worlds(1, 4):
        with case.fleet(world, tensors) as fleet:
            for number in range(2):
                assert all_same(fleet.step(random_grads(world, tensors, seed=number)))


def _filled(value: float) -> Callable[[Tensor, int], Tensor]:
    return lambda grad, rank: torch.full_like(grad, value)


def _spike(grad: Tensor, rank: int) -> Tensor:
    spike = torch.zeros_like(grad)
    spike.view(-1)[spike.numel() // 2 : spike.numel() // 2 + 1] = 1000.0
    return spike


def _scales(grad: Tensor, rank: int) -> Tensor:
    """Return numbers over 16 orders of magnitude, that of each rank a thousand times the last one's."""
    return grad * torch.logspace(-8, 8, grad.numel()).view(grad.shape) * 1000.0**rank


#: By name, what is made of random numbers, and whether results have to be finite.
KINDS: dict[str, tuple[Callable[[Tensor, int], Tensor], bool]] = {
    "zero": (_filled(0.0), True),
    "minus zero": (_filled(-0.0), True),
    "constant": (_filled(1.5), True),
    "spike": (_spike, True),
    "denormal": (lambda grad, rank: grad.sign() * 1e-40, True),
    "scales": (_scales, False),  # beyond the range of 16 bits
    "huge": (lambda grad, rank: grad.sign() * 3e38, False),
}


@each_case(quick=FEW)
def test_kinds_of_input(case: Sample) -> None:
    """Nothing hangs, and no rank differs, whatever comes; what is small enough stays finite."""
    tensors = [spec("a", 20, 30), *GAPS]
    law = case.codec().properties().law
    for kind, (make, finite) in KINDS.items():
        with case.fleet(WORLD, tensors, timeout=10.0) as fleet:
            for number in range(3):
                grads = random_grads(WORLD, tensors, seed=number)
                grads = [{n: make(g, rank) for n, g in mine.items()} for rank, mine in enumerate(grads)]
                results = fleet.step(grads)
                assert all_same(results), kind
                if finite:
                    assert all(bool(result.isfinite().all()) for result in results[0].values()), kind
                if kind.endswith("zero") and (law.conserves or law.unbiased):
                    assert not any(bool(result.any()) for result in results[0].values()), kind
            if finite:
                assert all(bool(t.isfinite().all()) for mine in kept(fleet) for t in mine.values()), kind
