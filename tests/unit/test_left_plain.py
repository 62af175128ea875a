"""Buckets left uncompressed: what waits is sent once, and while nothing waits nothing is looked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from horovod_compress.schedule.plan import Plan, TensorSpec
from tests.support.accelerator import everything_on_accelerator
from tests.support.local import Fleet, random_grads, spec

WORLD = 3
TENSORS = [spec("a", 70, 33), spec("b", 2001)]
KEPT = 0.25


@pytest.fixture(params=["cpu", "accelerator"])
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A fleet whose only bucket is left uncompressed, on ranks that kept something in each element."""
    where = everything_on_accelerator() if request.param == "accelerator" else nullcontext()
    with where, Fleet(WORLD, TENSORS, "topk", schedule=Plan.of([(TENSORS, 1, True)])) as fleet:
        keep(fleet)
        yield fleet


def keep(fleet: Fleet) -> None:
    for reducer in fleet.reducers:
        for tensor in reducer.kept.residuals().values():
            tensor.fill_(KEPT)


def labels(fleet: Fleet) -> set[str]:
    return {reducer.buckets[0].round(reducer.step).label for reducer in fleet.reducers}


def error(fleet: Fleet, seed: int, more: float) -> float:
    """Take a step; return how far its results are from the mean of the gradients and as much more."""
    grads = random_grads(WORLD, TENSORS, seed=seed)
    results = fleet.step(grads)
    means = {name: torch.stack([mine[name].double() for mine in grads]).mean(0) for name in grads[0]}
    return max(float((found[name] - (mean + more)).abs().max()) for found in results for name, mean in means.items())


def test_what_waits_is_sent_once_and_then_gradients_go_as_they_are(fleet: Fleet) -> None:
    assert labels(fleet) == {"full precision"}
    assert error(fleet, 1, KEPT) < 1e-6
    assert labels(fleet) == {"none"}
    assert error(fleet, 2, 0.0) < 1e-6
    assert not any(tensor.any() for kept in fleet.residuals() for tensor in kept.values())


def test_a_step_that_is_not_finite_sends_nothing(fleet: Fleet) -> None:
    grads = random_grads(WORLD, TENSORS)
    grads[2]["b"][5] = float("inf")
    fleet.step(grads)
    assert labels(fleet) == {"full precision"}
    assert error(fleet, 1, KEPT) < 1e-6


def test_what_was_loaded_is_sent(fleet: Fleet) -> None:
    error(fleet, 1, KEPT)
    keep(fleet)
    fleet.resume(7)
    assert labels(fleet) == {"full precision"}
    assert error(fleet, 2, KEPT) < 1e-6


def test_after_a_resume_zeros_keep_their_signs(fleet: Fleet) -> None:
    """As in a run that was not interrupted, which does not add the empty residual."""
    error(fleet, 1, KEPT)
    negative = [
        {name: torch.full_like(grad, -0.0) for name, grad in mine.items()} for mine in random_grads(WORLD, TENSORS)
    ]
    whole = fleet.step(negative)
    fleet.resume(2)
    assert labels(fleet) == {"full precision"}
    resumed = fleet.step(negative)
    for before, after in zip(whole, resumed, strict=True):
        assert all(bool(before[name].signbit().all()) and bool(after[name].signbit().all()) for name in before)


def test_buckets_that_changed_are_looked_at_again(fleet: Fleet) -> None:
    error(fleet, 1, KEPT)
    for reducer in fleet.reducers:
        reducer.replan(fleet.plan)
    assert labels(fleet) == {"full precision"}
    assert error(fleet, 2, 0.0) < 1e-6 and labels(fleet) == {"none"}


def test_what_was_skipped_is_sent_later(fleet: Fleet) -> None:
    """A gradient may be sparse in one step, which Horovod reduces itself, and dense in another."""
    (index,) = [place for place, name in enumerate(fleet.plan.names()) if name == "b"]
    for reducer, mine in zip(fleet.reducers, random_grads(WORLD, TENSORS), strict=True):
        reducer.skip(index)
        step = reducer.offer(1 - index, mine["a"])
    for reducer in fleet.reducers:
        reducer.result(1 - index, step)
    grads = random_grads(WORLD, TENSORS, seed=1)
    mean = torch.stack([mine["b"].double() for mine in grads]).mean(0)
    assert all(float((found["b"] - (mean + KEPT)).abs().max()) < 1e-6 for found in fleet.step(grads))
    assert labels(fleet) == {"none"}


def test_the_two_kinds_of_rounds_share_their_memory(fleet: Fleet) -> None:
    state = fleet.reducers[0].buckets[0]
    before = state.round(0).work.regions["values"].data_ptr()
    error(fleet, 1, KEPT)
    assert state.round(1).work.regions["values"].data_ptr() == before


def test_residuals_are_looked_at_where_gradients_have_fewer_bits() -> None:
    tensors = [spec("half", 4001, dtype=torch.float16)]
    with Fleet(WORLD, tensors, "topk", schedule=Plan.of([(tensors, 1, True)])) as fleet:
        fleet.step(random_grads(WORLD, tensors))
        assert labels(fleet) == {"full precision"}


def test_fp16_left_uncompressed_is_not_rounded() -> None:
    tensors = [spec("a", 4001)]
    for plain, most in ((True, 1e-6), (False, 1e-2)):
        with Fleet(WORLD, tensors, "fp16", schedule=Plan.of([(tensors, 1, plain)])) as fleet:
            assert (error_of(fleet, tensors) < 1e-6) == plain
            assert error_of(fleet, tensors) < most


def error_of(fleet: Fleet, tensors: list[TensorSpec]) -> float:
    grads = random_grads(WORLD, tensors)
    mean = torch.stack([mine["a"].double() for mine in grads]).mean(0)
    return max(float((found["a"] - mean).abs().max()) for found in fleet.step(grads))
