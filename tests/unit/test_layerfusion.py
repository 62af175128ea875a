"""The best buckets by the cost model are the best of all, for up to ten tensors by trying every grouping."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import replace

import pytest

from horovod_compress.schedule.costs import Affine, Arrivals, Costs, Step, adjusted, fitted, step_seconds
from horovod_compress.schedule.layerfusion import best, best_of, even


def _case(draw: random.Random, count: int) -> tuple[Arrivals, Costs]:
    counts = tuple(draw.randint(1, 10 ** draw.randint(1, 6)) for _ in range(count))
    seconds = tuple(sorted(draw.random() * draw.choice([0.01, 0.1, 1]) for _ in range(count)))
    exchange = Affine(draw.random() * 0.01, draw.random() * draw.choice([0, 1e-7, 1e-6]))
    decode = Affine(draw.random() * 0.005, draw.random() * draw.choice([0, 1e-7, 1e-6]))
    return Arrivals(counts, seconds), Costs(exchange, decode)


def _every_grouping(count: int) -> list[list[int]]:
    found = []
    for cuts in range(1 << (count - 1)):
        groups = [1]
        for place in range(count - 1):
            if cuts >> place & 1:
                groups.append(1)
            else:
                groups[-1] += 1
        found.append(groups)
    return found


@pytest.mark.parametrize("count", range(1, 13))
def test_no_grouping_is_better(count: int) -> None:
    draw, every = random.Random(count), _every_grouping(count)
    for _ in range(20 if count < 10 else 3):
        arrivals, costs = _case(draw, count)
        groups = best(arrivals, costs)
        assert sum(groups) == count and min(groups) > 0
        lowest = min(step_seconds(arrivals, other, costs) for other in every)
        assert step_seconds(arrivals, groups, costs) == pytest.approx(lowest, rel=1e-12)


def test_known_ends() -> None:
    counts, seconds = (1000,) * 8, tuple(0.1 * place for place in range(8))
    free = Costs(Affine(0, 1e-6), Affine(0, 0))
    costly = Costs(Affine(10, 1e-6), Affine(0, 0))
    assert best(Arrivals(counts, seconds), costly) == [8]  # waiting costs less than another bucket
    assert best(Arrivals(counts, seconds), free)[-1] == 1  # nothing is left to do after the last gradient


def test_five_hundred_tensors_take_less_than_a_second() -> None:
    arrivals, costs = _case(random.Random(3), 500)
    began = time.process_time()
    best(arrivals, costs)
    assert time.process_time() - began < 1.0


def test_the_best_of_two_kinds_is_the_best_of_all_groupings_of_both() -> None:
    rng = random.Random(5)
    for _ in range(60):
        count = rng.randint(1, 7)
        arrivals, costs = _case(rng, count)
        kinds = [costs, _case(rng, count)[1]]
        groups, chosen = best_of(arrivals, kinds)
        found = step_seconds(arrivals, groups, [kinds[kind] for kind in chosen])
        lowest = min(
            step_seconds(arrivals, other, [kinds[kind] for kind in which])
            for other in _every_grouping(count)
            for which in itertools.product(range(2), repeat=len(other))
        )
        assert found == pytest.approx(lowest, rel=1e-12)


def test_costs_are_fitted_through_disturbed_points() -> None:
    points = [(n, 0.002 + 3e-9 * n) for n in (1e5, 1e6, 2e6, 5e6, 2e7)] + [(3e6, 0.5)]
    found = fitted(points)
    assert found.fixed == pytest.approx(0.002, rel=0.05) and found.each == pytest.approx(3e-9, rel=0.05)
    assert fitted([(1000.0, 0.5)]) == Affine(0.5, 0.0)
    downhill = fitted([(1e6, 0.001), (1e7, 0.1)])
    assert downhill.fixed == 0 and downhill(1e7) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="no measured costs"):
        fitted([])


def _steps(arrivals: Arrivals, costs: Costs, more: float) -> list[Step]:
    """Return what steps take where a bucket takes more than it shows."""
    dear = Costs(Affine(costs.exchange.fixed + more, costs.exchange.each), costs.decode)
    tried = [even(arrivals.counts, number) for number in (1, 3, 8, 20)]
    return [Step(groups, [0] * len(groups), step_seconds(arrivals, groups, dear)) for groups in tried]


def test_costs_are_raised_by_what_steps_take_longer() -> None:
    draw = random.Random(11)
    for _ in range(50):
        arrivals, costs = _case(draw, 40)
        longest = max(step.seconds for step in _steps(arrivals, costs, 0.0))
        assert adjusted([costs], arrivals, _steps(arrivals, costs, 0.0)) == [costs]  # nothing to add
        steps = _steps(arrivals, costs, 0.05 * longest)
        found = adjusted([costs], arrivals, steps)[0]
        assert found.exchange.each == costs.exchange.each and found.decode == costs.decode
        shorter = [replace(step, seconds=0.9 * step.seconds) for step in _steps(arrivals, costs, 0.0)]
        assert adjusted([costs], arrivals, shorter) == [costs]
        missed = [abs(step_seconds(arrivals, step.groups, found) / step.seconds - 1) for step in steps]
        assert max(missed) < 0.1


def test_plans_by_raised_costs_have_fewer_buckets() -> None:
    arrivals = Arrivals((10_000,) * 100, tuple(0.001 * place for place in range(100)))
    costs = Costs(Affine(1e-4, 1e-7), Affine(0, 1e-8))
    before = best(arrivals, costs)
    steps = _steps(arrivals, costs, 0.01)
    after = best(arrivals, adjusted([costs], arrivals, steps)[0])
    dear = Costs(Affine(1e-4 + 0.01, 1e-7), costs.decode)
    assert len(after) < len(before) / 2
    assert step_seconds(arrivals, after, dear) <= 1.02 * step_seconds(arrivals, best(arrivals, dear), dear)


def test_even_groups() -> None:
    assert even([10, 10, 10, 10], 2) == [2, 2]
    assert even([1000, 1, 1, 1], 4)[0] == 1 and sum(even([1000, 1, 1, 1], 4)) == 4
    assert even([5], 8) == [1]
