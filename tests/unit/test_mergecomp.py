"""MergeComp's search on simulated machines: where it cuts, what it measures, and that noise does not lead it astray."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from horovod_compress.cli.plan import models, prediction
from horovod_compress.schedule import layerfusion, mergecomp
from horovod_compress.schedule.costs import Affine, Arrivals, Costs
from horovod_compress.schedule.trial import BucketCost, Choice, Measured, SearchSpace
from tests.unit.test_auto import Machine, machine

MOST_TRIALS = 26


def _model(name: str, costs: Costs, noise: float, seed: int) -> Machine:
    """Return a machine that trains a model with 0.3 s of compute a step."""
    arrivals = prediction.arrivals(models.load(name), 0.3)
    since_first = tuple(at - arrivals.seconds[0] for at in arrivals.seconds)
    here = Machine(Arrivals(arrivals.counts, since_first), costs, costs, noise)
    here._draw = random.Random(seed)
    return here


@pytest.mark.parametrize("exchange", [2e-9, 4e-9, 25e-9])
def test_one_tensor_with_most_of_the_elements_does_not_lead_it_astray(exchange: float) -> None:
    """As VGG-16 has. A search by number of tensors looks among small ones, where nothing changes but noise."""
    costs, worse = Costs(Affine(6e-3, exchange), Affine(1e-3, 2e-9)), []
    for seed in range(20):
        here = _model("vgg16", costs, 0.03, seed)
        least = here.step(Choice(tuple(layerfusion.best(here.arrivals, costs))))
        worse.append(here.step(here.run(mergecomp.tune(SearchSpace(len(here.arrivals.counts))))) / least)
        assert here.trials <= MOST_TRIALS
    assert mean(worse) < 1.01 and max(worse) < 1.02


@pytest.mark.parametrize("exchange", [2e-9, 3e-9, 25e-9])
def test_many_tensors_of_equal_size_come_near_the_best(exchange: float) -> None:
    costs, worse = Costs(Affine(6e-3, exchange), Affine(1e-3, 2e-9)), []
    for seed in range(10):
        here = _model("resnet50", costs, 0.03, seed)
        least = here.step(Choice(tuple(layerfusion.best(here.arrivals, costs))))
        worse.append(here.step(here.run(mergecomp.tune(SearchSpace(len(here.arrivals.counts))))) / least)
        assert here.trials <= MOST_TRIALS
    assert mean(worse) < 1.08


def test_the_new_cut_goes_where_the_time_goes() -> None:
    """Nine small tensors, then a large one: all that a cut can change is when the large one begins."""
    counts = (*[10] * 9, 10_000_000, *[10] * 9)
    arrivals = Arrivals(counts, tuple(0.02 * place for place in range(len(counts))))
    costs = Costs(Affine(1e-3, 5e-8), Affine(1e-3, 0.0))
    chosen = Machine(arrivals, costs, costs).run(mergecomp.tune(SearchSpace(len(counts), "2")))
    assert chosen.counts == (10, 9)


def test_equal_measurements_give_equal_buckets() -> None:
    for count in (2, 9, 40):
        found = [machine(random.Random(count), count, 0.03).run(mergecomp.tune(SearchSpace(count))) for _ in range(2)]
        assert found[0] == found[1] and sum(found[0].counts) == count


@pytest.mark.parametrize("count", range(1, 15))
def test_the_lowest_of_a_falling_and_rising_row_is_found_with_few_measurements(count: int) -> None:
    row = [(cut,) for cut in range(1, count + 1)]
    for lowest in range(count):
        search = mergecomp._MergeCompSearch(count + 1)
        trying = search._lowest(row)
        wanted = next(trying)
        with pytest.raises(StopIteration) as end:
            while True:
                away = abs(wanted.counts[0] - 1 - lowest)
                wanted = trying.send(Measured(1.0 + away, Arrivals((), ()), []))
        assert end.value.value == row[lowest]
        assert len(search.found) <= (5 if count <= 12 else 6)


def test_a_tensor_takes_its_wait_and_its_share_of_its_bucket() -> None:
    arrivals = Arrivals((10, 30, 0, 60), (0.0, 1.0, 1.5, 4.0))
    buckets = [BucketCost(40, 3.0, 1.0), BucketCost(60, 5.0, 1.0)]
    takes = mergecomp.seconds_of_tensors(Measured(0.0, arrivals, buckets), (2, 2))
    assert takes == pytest.approx([1.0, 4.0, 0.5, 8.5])
    # Of a bucket nothing was exchanged: the elements of the others cannot be told apart from its own.
    takes = mergecomp.seconds_of_tensors(Measured(0.0, arrivals, buckets[:1]), (2, 2))
    assert takes == pytest.approx([0.4, 2.2, 0.5, 4.9])


def test_places_lie_a_cell_apart_in_time() -> None:
    assert mergecomp.places([1.0] * 12, 0, 12, 4) == [3, 6, 9]
    assert mergecomp.places([0.0, 9.0, 0.0, 0.0, 3.0], 0, 5, 4) == [2]
    assert mergecomp.places([0.0, 0.0, 5.0], 0, 3, 4) == [2]
    assert mergecomp.places([7.0, 1.0, 1.0, 7.0], 1, 3, 4) == [2]
    assert len(mergecomp.places([1.0] * 1000, 0, 1000, 13)) == 12


def test_a_lucky_measurement_is_measured_again() -> None:
    """One choice seems good once; the next one is really good."""
    search = mergecomp._MergeCompSearch(4)
    nothing = (Arrivals((), ()), [])
    search.found = {(1,): Measured(1.0, *nothing), (2,): Measured(1.1, *nothing), (3,): Measured(9.0, *nothing)}
    ending = search.run_off()
    assert next(ending).counts == (1, 3) and ending.send(Measured(1.6, *nothing)).counts == (2, 2)
    with pytest.raises(StopIteration) as end:
        ending.send(Measured(1.1, *nothing))
    assert end.value.value == (2,)
