"""Equal bits on every rank and in every run; random methods give other bits with another seed."""

from __future__ import annotations

from typing import Any

import torch

from tests.battery.cases import each_case
from tests.battery.kept import Kept, kept, same
from tests.support.local import all_same, random_grads, spec
from tests.support.samples import FEW, Sample

TENSORS = [spec("a", 31, 40), spec("b", 65), spec("c", 3), spec("d")]
STEPS = 4


def _run(case: Sample, world: int, grads: int = 0, **common: Any) -> tuple[list[Kept], Kept]:
    """Return the results of some steps, and what is kept at the end."""
    with case.fleet(world, TENSORS, **common) as fleet:
        results = [fleet.step(random_grads(world, TENSORS, seed=grads + n)) for n in range(STEPS)]
        assert [reducer.metrics.verified for reducer in fleet.reducers] == [STEPS if world > 1 else 0] * world
        return results, kept(fleet)


@each_case(quick=FEW)
def test_ranks_agree_and_runs_repeat(case: Sample) -> None:
    """For 1 to 4 ranks and every exchange that fits; other gradients give other bits, as a control."""
    assert case.worlds(2), "every method serves two ranks with its samples"
    for world in case.worlds(1, 2, 3, 4):
        for exchange in case.exchanges():
            first, left = _run(case, world, exchange=exchange)
            assert all(all_same(results) for results in first)
            again, left_again = _run(case, world, exchange=exchange)
            assert all(same(a, b) for a, b in zip(first, again, strict=True)) and same(left, left_again)
        assert not same(first[-1], _run(case, world, grads=50)[0][-1])


@each_case()
def test_buckets_change_nothing_for_the_ranks(case: Sample) -> None:
    """Whatever shares a bucket, and in whatever order gradients come, all ranks hold the same bits."""
    for schedule in ("layerwise", "size:1KB"):
        with case.fleet(3, TENSORS, schedule=schedule, min_elements=2) as fleet:
            for number in range(2):
                grads = random_grads(3, TENSORS, seed=number)
                step = fleet.offer(grads, order=["d", "b", "a", "c"])
                results = [{n: r.result(fleet._index[n], step) for n in grads[0]} for r in fleet.reducers]
                assert all_same(results)


@each_case(lambda codec: codec.properties().law.unbiased)
def test_the_seed_decides_what_is_random(case: Sample) -> None:
    """An unbiased result that is not the mean owes its right to chance: another seed gives other bits.

    Methods that only round are the other way round: the seed changes nothing.
    """
    world = 3
    with case.fleet(world, TENSORS) as fleet:
        grads = random_grads(world, TENSORS)
        result = fleet.step(grads)[0]["a"].double()
    stack = torch.stack([mine["a"] for mine in grads]).double()
    exact = bool(
        ((result - stack.mean(0)).abs() <= 2 * world * case.codec().properties().law.epsilon * stack.abs().sum(0)).all()
    )
    assert same(_run(case, world, seed=1)[0][-1], _run(case, world, seed=2)[0][-1]) == exact
