"""NaN and infinity: every rank sees them, nobody remembers them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from horovod_compress.codecs import registry
from horovod_compress.engine.reducer import Reducer
from horovod_compress.errors import NonFiniteError
from tests.battery.cases import each_case
from tests.battery.kept import anything, kept, kept_by, same
from tests.support.local import Fleet, all_same, random_grads, same_bits, spec
from tests.support.marks import each_value
from tests.support.samples import ANY_BUCKET, FEW, Sample, keeps_anything

WORLD = 3
TENSORS = [spec("b", 70), spec("a", 5, 40)]
REGISTERED = [registry.codec_class(name) for name in registry.methods()]
BAD = [math.nan, math.inf, -math.inf]
Grads = list[dict[str, Tensor]]


def _spoilt(grads: Grads, rank: int, value: float) -> Grads:
    """Return the gradients with one bad value, in the tensor that has the second bucket."""
    grads = [{n: grad.clone() for n, grad in mine.items()} for mine in grads]
    grads[rank]["a"].view(-1)[17] = value
    return grads


def _of_bucket(fleet: Fleet, index: int) -> Grads:
    """Return copies of what every rank keeps for one bucket, its tables included."""
    names = [t.name for t in fleet.plan.buckets[index].tensors]
    return [{n: t.clone() for n, t in _views(r, index, names).items()} for r in fleet.reducers]


def _views(reducer: Reducer, index: int, names: list[str]) -> dict[str, Tensor]:
    state = reducer.buckets[index]
    return kept_by(reducer, names) | state.memory.tables | state.rounds.carry()


def _walk(case: Sample, hurt: Fleet, healthy: Fleet) -> None:
    """Let one bucket be spoilt in every second step, on another rank each time; compare with a healthy run."""
    twin = healthy.plan.buckets[1].index
    for number in range(12):
        grads = random_grads(WORLD, TENSORS, seed=number)
        if number % 2 == 0:
            assert same(hurt.step(grads), healthy.step(grads))
            continue
        before = _of_bucket(hurt, twin)
        results = hurt.step(_spoilt(grads, number % WORLD, BAD[number // 2 % len(BAD)]))
        assert all(bool(mine["a"].isnan().all()) for mine in results)
        assert same(before, _of_bucket(hurt, twin))
        _only_bucket(healthy, 0, grads)
        assert all(same_bits(mine["b"], results[0]["b"]) and bool(mine["b"].isfinite().all()) for mine in results)


def _only_bucket(fleet: Fleet, index: int, grads: Grads) -> None:
    """Let a healthy run take the step with one bucket only: what it keeps for the other is put back."""
    other = _of_bucket(fleet, 1 - index)
    fleet.step(grads)
    names = [t.name for t in fleet.plan.buckets[1 - index].tensors]
    for reducer, old in zip(fleet.reducers, other, strict=True):
        assert reducer.wait_idle(5.0)
        for name, tensor in _views(reducer, 1 - index, names).items():
            tensor.copy_(old[name])


@each_case(quick=FEW)
def test_a_bucket_is_nan_everywhere_and_leaves_no_trace(case: Sample) -> None:
    """The next steps equal those of a run that never saw it, in every bit of results and of all that is kept."""
    for exchange in case.exchanges():
        options = dict(exchange=exchange, schedule="layerwise")
        with case.fleet(WORLD, TENSORS, **options) as hurt, case.fleet(WORLD, TENSORS, **options) as healthy:
            _walk(case, hurt, healthy)
            assert same(kept(hurt), kept(healthy))
            assert [reducer.metrics.nonfinite for reducer in hurt.reducers] == [6] * WORLD
            if keeps_anything(case.codec()):
                assert anything(kept(hurt))  # or equality would say nothing


@each_case()
def test_raise(case: Sample) -> None:
    """On every rank, for the bucket that is not finite; what is kept stays, and the next step works."""
    with case.fleet(WORLD, TENSORS, schedule="layerwise", nonfinite="raise") as fleet:
        for number in range(3):
            fleet.step(random_grads(WORLD, TENSORS, seed=number))
        before = _of_bucket(fleet, 1)
        step = fleet.offer(_spoilt(random_grads(WORLD, TENSORS, seed=8), 1, math.inf))
        for reducer in fleet.reducers:
            assert bool(reducer.result(fleet._index["b"], step).isfinite().all())
            with pytest.raises(NonFiniteError, match="the first on rank 1"):
                reducer.result(fleet._index["a"], step)
        assert same(before, _of_bucket(fleet, 1))
        results = fleet.step(random_grads(WORLD, TENSORS, seed=9))
        assert all_same(results) and bool(results[0]["a"].isfinite().all())


@each_case()
def test_zero(case: Sample) -> None:
    """Values that are not finite count as zeros, in every bit; every rank knows how many there were."""
    with case.fleet(WORLD, TENSORS, nonfinite="zero") as hurt, case.fleet(WORLD, TENSORS) as healthy:
        for number in range(6):
            grads = random_grads(WORLD, TENSORS, seed=number)
            results = hurt.step(_spoilt(grads, number % WORLD, BAD[number % len(BAD)]))
            assert same(results, healthy.step(_spoilt(grads, number % WORLD, 0.0)))
        assert same(kept(hurt), kept(healthy))
        counts = [[reducer.metrics.nonfinite for reducer in fleet.reducers] for fleet in (hurt, healthy)]
        assert counts == [[6] * WORLD, [0] * WORLD]


@each_case()
def test_odd_but_finite_numbers_are_not_counted(case: Sample) -> None:
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-39, 3e4, -3e4, 1.0] * 8)
    with case.fleet(2, [spec("a", 64)]) as fleet:
        for _ in range(4):
            results = fleet.step([{"a": odd}, {"a": odd.flip(0)}])
            assert all_same(results) and bool(results[0]["a"].isfinite().all())
        assert fleet.reducers[0].metrics.nonfinite == 0


@each_value
@each_case(lambda codec: type(codec) in REGISTERED, quick=FEW)  # the toys would only need more lines
@pytest.mark.parametrize(
    ("dtype", "huge"), [(torch.float32, 2e38), (torch.float64, 2e39), (torch.float64, 1e308)], ids=str
)
def test_huge_numbers_do_no_lasting_harm(case: Sample, dtype: torch.dtype, huge: float) -> None:
    """What a huge step gives may be infinite or NaN; the steps after it are finite, and so is all that is kept."""
    tensors = [spec("b", 70, dtype=dtype), spec("a", 5, 40, dtype=dtype)]
    with case.fleet(WORLD, tensors, schedule="layerwise") as fleet:
        for number in range(12):
            grads = random_grads(WORLD, tensors, seed=number)
            if number == 4:
                grads = [{name: huge * grad.sign() for name, grad in mine.items()} for mine in grads]
            results = fleet.step(grads)
            assert all_same(results)
            if number != 4:
                assert all(bool(grad.isfinite().all()) for grad in results[0].values()), number
                assert all(bool(tensor.isfinite().all()) for mine in kept(fleet) for tensor in mine.values())


def test_what_was_dropped_is_counted_so_far() -> None:
    with Fleet(1, TENSORS, "topk", schedule="single") as fleet:
        (state,) = fleet.reducers[0].buckets
        for number in (1, 2):
            state.memory.state["residual"][state.memory.span(0)][:number] = math.nan
            assert state.drop_spoilt(0) and not state.drop_spoilt(0)
        assert state.dropped == {state.bucket.tensors[0].name: 3}


@each_case(lambda codec: type(codec) in REGISTERED and bool(codec.layout(ANY_BUCKET, 1).state))
@pytest.mark.parametrize("value", [math.nan, 3e38], ids=str)
def test_what_waits_and_is_not_finite_does_not_stay(
    case: Sample, value: float, caplog: pytest.LogCaptureFixture
) -> None:
    """However it came there: the next step but one is finite, with one warning by the rank that had it."""
    with case.fleet(WORLD, TENSORS, schedule="layerwise") as fleet:
        fleet.step(random_grads(WORLD, TENSORS, seed=0))
        assert all(reducer.wait_idle(5.0) for reducer in fleet.reducers)
        for tensors in fleet.reducers[1].kept.states().values():
            tensors["a"].view(-1)[3] = value
        for number in range(1, 4):
            results = fleet.step(random_grads(WORLD, TENSORS, seed=number))
            assert all_same(results) and (number == 1 or bool(results[0]["a"].isfinite().all()))
        assert all(bool(tensor.isfinite().all()) for mine in kept(fleet) for tensor in mine.values())
    said = [record.getMessage() for record in caplog.records if "have been dropped" in record.getMessage()]
    assert all("rank 1" in text and "kept for a " in text for text in said) and len(said) <= 1
