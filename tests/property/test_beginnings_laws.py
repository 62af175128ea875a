"""Second moments that begin later than others, or anew, are made of exact gradients, as those of the start are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from tests.golden.trained import Checkpoint, Ranks
from tests.support.local import all_same, random_grads, spec

TENSORS = [spec("body", 12, 40), spec("late", 20, 10)]
WORLD, FIRST, BEGINS, STEPS = 2, 4, 10, 20
REGULAR = [*range(FIRST + 1)]  # exact rounds, until one in fifty is
RATE, BETA2 = 0.01, 0.999
MEET = {"second_moment": "shared", "warmup_steps": FIRST, "rebuild_every": 50}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE, betas=(0.9, BETA2))


class Training:
    """Ranks that do steps of which some parameters have no part, or no gradient but zeros."""

    def __init__(self, method: str = "marsit", **meet: Any) -> None:
        self.ranks = Ranks(TENSORS, method, adam, MEET | meet, WORLD, min_elements=1)
        self.exact: list[int] = []

    def step(self, number: int, *, without: Collection[str] = (), zeros: Collection[str] = ()) -> dict[str, Tensor]:
        """Do a step; return its results."""
        given = random_grads(WORLD, TENSORS, seed=number)
        for name in zeros:
            for mine in given:
                mine[name].zero_()
        for steps in self.ranks.steps:
            steps.begin()
        results = self.ranks.fleet.step(given)
        assert all(reducer.wait_idle(5.0) for reducer in self.ranks.fleet.reducers)
        for model, optimizer, result in zip(self.ranks.models, self.ranks.optimizers, results, strict=True):
            for name, parameter in model.items():
                parameter.grad = None if name in without else result[name].clone()
            optimizer.step()
        assert all_same([{n: p.detach() for n, p in model.items()} for model in self.ranks.models])
        held = self.ranks.steps[0].held
        assert held
        if held.exact:
            self.exact.append(number)
        return results[0]

    def moment(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ranks.steps[0].state()["second_moment"].get(name, {})
        return found

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.ranks.models[0].items()}

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        self.ranks.__exit__(None, None, None)


def mean_of_squares(results: list[Tensor], steps: int) -> Tensor:
    """Return Adam's second moment after some gradients, without the bias of so many steps."""
    found = torch.zeros_like(results[0], dtype=torch.float64)
    for result in results:
        found = BETA2 * found + (1 - BETA2) * result.double() ** 2
    return found / (1 - BETA2**steps)


def freeze(training: Training, frozen: bool) -> None:
    for model in training.ranks.models:
        model["late"].requires_grad_(not frozen)


@pytest.mark.parametrize("step", ["torch", "auto"])
@pytest.mark.parametrize("method", ["marsit", "topk", "powersgd"])
def test_one_that_is_frozen_at_first_begins_with_exact_rounds(method: str, step: str) -> None:
    with Training(method, step=step) as training:
        results = []
        for number in range(STEPS):
            freeze(training, number < BEGINS)
            results.append(training.step(number, without=["late"] if number < BEGINS else []))
            if number == BEGINS + FIRST:
                assert not training.moment("late")
        assert training.exact == [*REGULAR, *range(BEGINS + 1, BEGINS + 1 + FIRST)]
        exact = [result["late"] for result in results[BEGINS + 1 : BEGINS + 1 + FIRST]]
        torch.testing.assert_close(training.moment("late")["moment"].double(), mean_of_squares(exact, FIRST + 1))


@pytest.mark.parametrize("seldom", [False, True])
def test_one_that_began_in_the_first_rounds_needs_no_others(seldom: bool) -> None:
    with Training() as training:
        for number in range(STEPS):
            training.step(number, without=["late"] if seldom and number % 3 else [])
        assert training.exact == REGULAR


def test_state_that_is_cleared_begins_with_exact_rounds_at_once() -> None:
    with Training() as training:
        for number in range(STEPS):
            for optimizer in training.ranks.optimizers if number == BEGINS else ():
                optimizer.state.clear()
            training.step(number)
        assert training.exact == [*REGULAR, *range(BEGINS, BEGINS + FIRST)]


def test_the_first_gradient_behind_zeros_is_dropped_and_exact_rounds_follow() -> None:
    """As of a layer that the loss comes to later, where unused parameters have zeros: nothing says how far to move."""
    with Training() as training:
        for number in range(BEGINS):
            training.step(number, zeros=["late"])
        before = training.weights()
        training.step(BEGINS)
        after = training.weights()
        assert torch.equal(before["late"], after["late"]) and not torch.equal(before["body"], after["body"])
        first = training.step(BEGINS + 1)
        torch.testing.assert_close(
            training.moment("late")["moment"].double(), mean_of_squares([first["late"]], len(REGULAR) + 1)
        )
        for number in range(BEGINS + 2, STEPS):
            training.step(number)
        assert training.exact == [*REGULAR, *range(BEGINS + 1, BEGINS + 1 + FIRST)]


def test_what_waited_before_the_optimizer_had_a_parameter_is_dropped() -> None:
    """It is of gradients that nobody used; that of other parameters stays."""
    with Training("topk") as training:
        for number in range(BEGINS + 1):
            training.step(number, without=["late"] if number < BEGINS else [])
        before = training.ranks.fleet.residuals()[0]
        training.step(BEGINS + 1)
        after = training.ranks.fleet.residuals()[0]
    assert bool(before["late"].any()) and not bool(after["late"].any())
    assert bool(before["body"].any()) and bool(after["body"].any())


@pytest.mark.parametrize("saved", range(BEGINS, BEGINS + FIRST + 3))
def test_a_resume_amid_them_has_the_same_bits(saved: int) -> None:
    with Training() as whole, Training() as resumed:
        for number in range(STEPS):
            whole.step(number, without=["late"] if number < BEGINS else [])
            if number >= saved:
                resumed.step(number, without=["late"] if number < BEGINS else [])
            elif number == saved - 1:
                Checkpoint.of(whole.ranks).resume(resumed.ranks)
        assert resumed.exact == [number for number in whole.exact if number >= saved]
        assert all(torch.equal(one, resumed.weights()[name]) for name, one in whole.weights().items())


def test_rank_0_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "horovod_compress")
    with Training() as training:
        for number in range(STEPS):
            training.step(number, without=["late"] if number < BEGINS else [])
    told = [text for text in caplog.messages if "begins only now" in text]
    assert told == ["a second moment begins only now, that of late: the next 4 rounds are exact, as at the start"]
