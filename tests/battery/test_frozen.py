"""A frozen tensor gets nothing, gives nothing, and goes on later with what waited for it, with every method."""

from __future__ import annotations

import pytest
import torch

from horovod_compress.errors import MismatchError
from tests.battery.cases import each_case
from tests.battery.kept import kept_by, same
from tests.support.local import Fleet, all_same, random_grads, spec
from tests.support.marks import each_value, slow
from tests.support.samples import FEW, Sample

WORLD = 3
TENSORS = [spec("a", 40, 50), spec("b", 700), spec("c", 90, 20)]
GRADS = [random_grads(WORLD, TENSORS, seed=number) for number in range(9)]


def _step(fleet: Fleet, number: int, frozen: set[str]) -> list[dict[str, torch.Tensor]]:
    """Do one step with some tensors frozen, whose gradients are whatever was left there."""
    names = fleet.plan.names()
    for reducer in fleet.reducers:
        reducer.freeze(names.index(name) for name in frozen)
    return fleet.step(GRADS[number])


def _kept_for(fleet: Fleet, names: set[str]) -> list[dict[str, torch.Tensor]]:
    return [{n: t.clone() for n, t in kept_by(reducer, names).items()} for reducer in fleet.reducers]


@each_value
@each_case(quick=FEW)
@pytest.mark.parametrize("schedule", ["single", "layerwise"])
@pytest.mark.parametrize("frozen", [{"b"}, {"a", "b", "c"}], ids=["one", "all"])
def test_a_frozen_tensor_rests(case: Sample, schedule: str, frozen: set[str]) -> None:
    with case.fleet(WORLD, TENSORS, schedule=schedule) as fleet:
        for number in range(3):
            fleet.step(GRADS[number])
        before, names = _kept_for(fleet, frozen), {tensor.name for tensor in TENSORS}
        assert _moved(fleet, range(3, 6), frozen) == names - frozen
        assert same(before, _kept_for(fleet, frozen))
        assert _moved(fleet, range(6, 9), set()) == names


def _moved(fleet: Fleet, numbers: range, frozen: set[str]) -> set[str]:
    """Do some steps; return what any of them moved, as a method need not send each tensor in every step."""
    moved = set()
    for number in numbers:
        results = _step(fleet, number, frozen)
        assert all_same(results) and all(bool(result.isfinite().all()) for result in results[0].values())
        moved |= {name for name, result in results[0].items() if result.any()}
    return moved


@each_case(lambda codec: codec.name == "topk" and codec.properties().law.conserves)
def test_nothing_is_lost_meanwhile(case: Sample) -> None:
    """What was sent and what waits add up to what was offered while the tensor was not frozen."""
    with case.fleet(WORLD, TENSORS) as fleet:
        offered = sent = torch.zeros(700)
        for number in range(9):
            rests = 3 <= number < 6
            results = _step(fleet, number, {"b"} if rests else set())
            sent = sent + results[0]["b"]
            if not rests:
                offered = offered + torch.stack([mine["b"] for mine in GRADS[number]]).mean(dim=0)
        waits = torch.stack([mine["b"] for mine in fleet.residuals()]).mean(dim=0)
        torch.testing.assert_close(sent + waits, offered, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schedule", [*slow("single"), "layerwise"])
def test_ranks_that_freeze_different_tensors_are_told_at_once(schedule: str) -> None:
    with Fleet(WORLD, TENSORS, "topk", schedule=schedule, timeout=15.0) as fleet:
        fleet.step(GRADS[0])
        fleet.reducers[1].freeze([1])
        fleet.reducers[2].freeze([0])
        step = fleet.offer([{name: grad.clone() for name, grad in mine.items()} for mine in GRADS[1]])
        for rank, reducer in enumerate(fleet.reducers):
            with pytest.raises(MismatchError, match=r"froze or unfroze parameters|requires_grad_\(\)"):
                reducer.result(rank, step)


def test_a_tensor_that_is_frozen_on_all_ranks_but_in_another_step_is_an_error_too() -> None:
    with Fleet(2, TENSORS, "topk", timeout=15.0) as fleet:
        grads = [random_grads(2, TENSORS, seed=number) for number in range(2)]
        fleet.step(grads[0])
        fleet.reducers[1].freeze([1])
        step = fleet.offer([{name: grad.clone() for name, grad in mine.items()} for mine in grads[1]])
        for reducer in fleet.reducers:
            with pytest.raises(MismatchError, match="rank 1 loaded a state, or froze or unfroze parameters"):
                reducer.result(0, step)
