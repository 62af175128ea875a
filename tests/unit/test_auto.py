"""The default schedule on simulated machines: it comes near the best of all others, whatever the network."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest

from horovod_compress.schedule import auto, layerfusion, mergecomp
from horovod_compress.schedule.costs import Affine, Arrivals, Costs, step_seconds
from horovod_compress.schedule.trial import BucketCost, Choice, Measured, SearchSpace, Tuning
from tests.support.marks import slow

MOST_TRIALS = 15


@dataclass
class Machine:
    """Takes the time that the cost model says, but for noise that only adds."""

    arrivals: Arrivals
    compressed: Costs
    plain: Costs
    noise: float = 0.0
    more: float = 0.0  # what an exchange takes in whole steps, and does not show
    late: float = 0.0  # what every step takes longer

    def __post_init__(self) -> None:
        self._draw, self.trials = random.Random(1), 0

    def _kinds(self, choice: Choice) -> list[Costs]:
        return [self.plain if place in choice.plain else self.compressed for place in range(len(choice.counts))]

    def step(self, choice: Choice) -> float:
        kinds = [Costs(Affine(k.exchange.fixed + self.more, k.exchange.each), k.decode) for k in self._kinds(choice)]
        return self.late + step_seconds(self.arrivals, choice.counts, kinds)

    def measure(self, choice: Choice) -> Measured:
        assert sum(choice.counts) == len(self.arrivals.counts) and min(choice.counts) > 0
        assert all(0 <= place < len(choice.counts) for place in choice.plain)
        self.trials += 1
        buckets, first = [], 0
        for place, (count, kind) in enumerate(zip(choice.counts, self._kinds(choice), strict=True)):
            elements = sum(self.arrivals.counts[first : first + count])
            first += count
            exchange, decode = (self._noisy(cost(elements)) for cost in (kind.exchange, kind.decode))
            buckets.append(BucketCost(elements, exchange, decode, place in choice.plain))
        return Measured(self._noisy(self.step(choice)), self.arrivals, buckets)

    def _noisy(self, seconds: float) -> float:
        return seconds * (1 + self.noise * self._draw.random())

    def run(self, tuning: Tuning) -> Choice:
        wanted = next(tuning)
        while True:
            try:
                wanted = tuning.send(self.measure(wanted))
            except StopIteration as end:
                return end.value

    def others(self) -> list[Choice]:
        """Return what all other schedules choose, with and without compression."""
        count = len(self.arrivals.counts)
        fixed = [(1,) * count, (count,), tuple(auto.usual(self.arrivals.counts))]
        found = [Choice(counts) for counts in fixed]
        found += [Choice(counts, frozenset(range(len(counts)))) for counts in fixed]
        return [*found, self.run(mergecomp.tune(SearchSpace(count))), self.run(layerfusion.tune(SearchSpace(count)))]


def machine(draw: random.Random, count: int, noise: float = 0.0) -> Machine:
    counts = tuple(draw.choice([100, 10_000, 500_000, 2_000_000]) for _ in range(count))
    backward = draw.choice([0.01, 0.1, 1.0])
    seconds = tuple(sorted(draw.random() * backward for _ in range(count)))
    each = draw.choice([2e-10, 2e-9, 4e-8])  # seconds a number on the wire, uncompressed
    fixed = draw.choice([1e-4, 1e-3, 1e-2])
    saved = draw.choice([0.03, 0.25, 0.5])
    work = draw.choice([5e-10, 5e-9])  # seconds a number for encoding
    compressed = Costs(Affine(fixed * draw.choice([1, 2]), each * saved + work), Affine(1e-4, work))
    return Machine(Arrivals(counts, seconds), compressed, Costs(Affine(fixed, each), Affine(1e-4, 5e-10)), noise)


@pytest.mark.parametrize("count", [1, 2, 3, 9, 40, *slow(161)])
def test_near_the_best_of_all_others(count: int) -> None:
    draw = random.Random(count)
    for _ in range(20):
        here = machine(draw, count)
        found = here.run(auto.tune(SearchSpace(count, may_be_plain=True)))
        assert here.trials <= MOST_TRIALS
        assert here.step(found) <= 1.03 * min(here.step(other) for other in here.others())


def test_near_the_best_in_spite_of_noise() -> None:
    draw, worse = random.Random(3), []
    for _ in range(40):
        here = machine(draw, 60, noise=0.03)
        found = here.run(auto.tune(SearchSpace(60, may_be_plain=True)))
        worse.append(here.step(found) / min(here.step(other) for other in here.others()))
    assert max(worse) <= 1.08 and sum(worse) / len(worse) <= 1.02


@pytest.mark.parametrize(("noise", "late", "worse"), [(0.0, 0.0, 1.02), (0.02, 0.0, 1.04), (0.0, 0.03, 1.07)])
def test_near_the_best_where_exchanges_take_longer_in_whole_steps_than_they_show(
    noise: float, late: float, worse: float
) -> None:
    counts, seconds = (300_000,) * 80, tuple(0.002 * place for place in range(80))
    shown = Costs(Affine(2e-3, 2e-9), Affine(1e-3, 2e-9))
    for more in (0.0, 0.004, 0.008, 0.016):
        here = Machine(Arrivals(counts, seconds), shown, shown, noise, more, late)
        dear = Costs(Affine(2e-3 + more, 2e-9), shown.decode)
        least = here.step(Choice(tuple(layerfusion.best(here.arrivals, dear))))
        for schedule in (auto, layerfusion):
            assert here.step(here.run(schedule.tune(SearchSpace(80)))) <= worse * least


@pytest.mark.parametrize("more", [0.0, 0.01])
def test_whole_steps_raise_the_costs_of_both_kinds(more: float) -> None:
    counts, seconds = (300_000,) * 80, tuple(0.002 * place for place in range(80))
    compressed, plain = Costs(Affine(2e-3, 2e-9), Affine(1e-3, 2e-9)), Costs(Affine(8e-3, 4e-8), Affine(2e-3, 1e-9))
    here, search = (
        Machine(Arrivals(counts, seconds), compressed, plain, more=more),
        auto._AutoSearch(SearchSpace(80, may_be_plain=True)),
    )
    for choice in (Choice((80,)), Choice(tuple(auto.usual(counts))), auto.probe(counts, True)):
        search.found[choice] = here.measure(choice)
        search.costs += search.found[choice].buckets
    found = search.kinds()
    assert [kind.exchange.fixed for kind in found] == pytest.approx([2e-3 + more, 8e-3 + more], rel=0.15)
    assert [kind.exchange.each for kind in found] == pytest.approx([2e-9, 4e-8], rel=0.01)


def test_nothing_is_left_uncompressed_where_that_may_not_be() -> None:
    here = machine(random.Random(4), 30)
    here.compressed = Costs(Affine(1.0, 1e-6), Affine(1.0, 1e-6))  # it would pay
    tuning, found = auto.tune(SearchSpace(30)), []
    wanted = next(tuning)
    with pytest.raises(StopIteration) as end:
        while True:
            found.append(wanted)
            wanted = tuning.send(here.measure(wanted))
    assert not any(choice.plain for choice in [*found, end.value.value])


def test_a_fast_network_gets_no_compression_and_a_slow_one_does_and_says_why() -> None:
    counts, seconds = (400_000,) * 20, tuple(0.01 * place for place in range(20))
    work = Costs(Affine(2e-4, 3e-9), Affine(1e-4, 2e-9))
    fast = Machine(Arrivals(counts, seconds), work, Costs(Affine(2e-4, 1e-9), Affine(1e-4, 0)))
    found = fast.run(auto.tune(SearchSpace(20, may_be_plain=True)))
    assert len(found.plain) == len(found.counts) and "none compressed" in found.why
    weak = Machine(Arrivals(counts, seconds), work, Costs(Affine(2e-4, 1e-6), Affine(1e-4, 0)))
    found = weak.run(auto.tune(SearchSpace(20, may_be_plain=True)))
    assert not found.plain and "all compressed" in found.why


@pytest.mark.parametrize(("longer", "kept"), [(1.005, (4,)), (1.015, (1, 1, 1, 1))])
def test_of_steps_that_are_as_good_as_equal_that_with_less_work_is_kept(longer: float, kept: tuple[int, ...]) -> None:
    come, search = Arrivals((10,) * 4, (0.0,) * 4), auto._AutoSearch(SearchSpace(4))
    search.found[Choice((4,))] = Measured(longer, come, [BucketCost(40, 0.1, 0.1)])
    search.found[Choice((1, 1, 1, 1))] = Measured(1.0, come, [BucketCost(10, 0.2, 0.0)] * 4)
    assert auto._kept(search).counts == kept


def test_slow_networks_never_carry_a_whole_step_uncompressed() -> None:
    counts, seconds = (400_000,) * 40, tuple(0.001 * place for place in range(40))
    weak = Machine(
        Arrivals(counts, seconds), Costs(Affine(1e-3, 1e-9), Affine(0, 1e-9)), Costs(Affine(1e-3, 4e-8), Affine(0, 0))
    )
    tried: list[Choice] = []
    measure = weak.measure
    weak.measure = lambda choice: tried.append(choice) or measure(choice)  # type: ignore[method-assign]
    weak.run(auto.tune(SearchSpace(40, may_be_plain=True)))
    uncompressed = [sum(choice.counts[place] for place in choice.plain) for choice in tried]
    assert 0 < max(uncompressed) <= 8


def test_empty_tensors_are_planned_for_too() -> None:
    for counts in [(300_000, 0), (0, 300_000), (0, 0, 5), (1000, 0, 0, 2000)]:
        here = machine(random.Random(2), len(counts))
        here.arrivals = Arrivals(counts, here.arrivals.seconds)
        found = here.run(auto.tune(SearchSpace(len(counts), may_be_plain=True)))
        assert sum(found.counts) == len(counts)


def test_neighbours_cover_the_same_tensors() -> None:
    draw = random.Random(6)
    for _ in range(200):
        count = draw.randint(1, 12)
        counts = [draw.randint(1, 1000) for _ in range(count)]
        groups = layerfusion.even(counts, draw.randint(1, count))
        choice = Choice(tuple(groups), frozenset(draw.sample(range(len(groups)), draw.randint(0, len(groups)))))
        for other in auto.neighbours(choice, counts):
            assert sum(other.counts) == count and min(other.counts) > 0 and other != choice
            assert all(0 <= place < len(other.counts) for place in other.plain)


def test_the_search_is_quick_for_five_hundred_tensors() -> None:
    here = machine(random.Random(8), 500)
    began = time.thread_time()
    here.run(auto.tune(SearchSpace(500, may_be_plain=True)))
    assert time.thread_time() - began < 1.0
