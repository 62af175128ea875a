"""Second moments that begin later than others, or anew, are made of exact gradients, as those of the start are."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from tests.golden.trained import Checkpoint, Ranks
from tests.support.local import all_same, random_grads, spec
from tests.support.marks import each_value

TENSORS = [spec("body", 12, 40), spec("late", 20, 10)]
WORLD, FIRST, BEGINS, STEPS = 2, 4, 10, 20
REGULAR = [*range(FIRST + 1)]  # exact rounds, until one in fifty is
RATE, BETA2 = 0.01, 0.999
MEET = {"second_moment": "shared", "warmup_steps": FIRST, "rebuild_every": 50}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE, betas=(0.9, BETA2))


ADAGRAD, ADAMAX = partial(torch.optim.Adagrad, lr=RATE), partial(torch.optim.Adamax, lr=RATE)


class Training:
    """Ranks that do steps of which some parameters have no part, or no gradient but zeros."""

    def __init__(self, method: str = "marsit", make: Any = adam, *, dead: bool = False, **meet: Any) -> None:
        self._dead = dead  # half of the elements never have a gradient
        self.ranks = Ranks(TENSORS, method, make, MEET | meet, WORLD, min_elements=1)
        self.exact: list[int] = []

    def step(
        self, number: int, *, without: Collection[str] = (), zeros: Collection[str] = (), used: bool = True
    ) -> dict[str, Tensor]:
        """Do a step, of which the optimizer may make no use; return its results."""
        given = random_grads(WORLD, TENSORS, seed=number)
        for mine in given:
            for name in zeros:
                mine[name].zero_()
            mine["late"][:, ::2] *= not self._dead
        for steps in self.ranks.steps:
            steps.begin()
        results = self.ranks.fleet.step(given)
        assert all(reducer.wait_idle(5.0) for reducer in self.ranks.fleet.reducers)
        for model, optimizer, result in zip(self.ranks.models, self.ranks.optimizers, results, strict=True):
            for name, parameter in model.items():
                parameter.grad = None if name in without else result[name].clone()
            if used:
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


def second_moment(exact: list[Tensor]) -> Tensor:
    """Return Adam's of some gradients, without its bias."""
    found = torch.zeros_like(exact[0], dtype=torch.float64)
    for result in exact:
        found = BETA2 * found + (1 - BETA2) * result.double() ** 2
    return found / (1 - BETA2 ** len(exact))


def freeze(training: Training, frozen: bool) -> None:
    for model in training.ranks.models:
        model["late"].requires_grad_(not frozen)


@pytest.mark.parametrize("step", ["torch", "auto"])
@pytest.mark.parametrize("method", ["marsit", "topk", "powersgd"])
def test_one_that_is_frozen_at_first_begins_with_exact_rounds(method: str, step: str) -> None:
    with Training(method, step=step, match_norm=False) as training:
        results = []
        for number in range(STEPS):
            freeze(training, number < BEGINS)
            results.append(training.step(number, without=["late"] if number < BEGINS else []))
        assert training.exact == [*REGULAR, *range(BEGINS + 1, BEGINS + 1 + FIRST)]
        expected = second_moment([result["late"] for result in results[BEGINS + 1 : BEGINS + 1 + FIRST]])
        torch.testing.assert_close(training.moment("late")["moment"].double(), expected)


@pytest.mark.parametrize(
    ("first", "after"), [(0, 1), (0, 3), (0, FIRST), *((BEGINS, after) for after in range(1, FIRST))]
)
def test_one_that_misses_more_than_half_of_them_has_as_many_again(first: int, after: int) -> None:
    """Else the square of one gradient could be all that is held of it."""
    began = first + after
    with Training("topk", match_norm=False) as training:
        results = []
        for number in range(2 * STEPS):
            for optimizer in training.ranks.optimizers if number == first > 0 else ():
                optimizer.state.clear()
            results.append(training.step(number, without=["late"] if number < began else [])["late"])
        end = first + FIRST + (first == 0)  # the first regular one follows the start
        end += FIRST if end - began < FIRST / 2 else 0
        assert training.exact == sorted({*REGULAR, *range(first, end)})
        expected = second_moment(results[began:end])
        torch.testing.assert_close(training.moment("late")["moment"], expected.float())


@pytest.mark.parametrize("seldom", [False, True])
def test_one_that_began_in_the_first_rounds_needs_no_others(seldom: bool) -> None:
    with Training() as training:
        for number in range(STEPS):
            training.step(number, without=["late"] if seldom and number % 3 else [])
        assert training.exact == REGULAR


@pytest.mark.parametrize(
    ("used", "end"), [(lambda number: number % 5 == 4, 2 * FIRST + 2), (lambda number: number >= FIRST, 2 * FIRST + 1)]
)
def test_where_most_of_them_are_not_used_as_many_follow_once(used: Callable[[int], bool], end: int) -> None:
    """As with an optimizer whose first step comes late: one gradient would be all that is held of it."""
    with Training("topk", match_norm=False) as training:
        for number in range(2 * STEPS):
            training.step(number, used=used(number))
        assert training.exact == [*range(end)]


@pytest.mark.parametrize("cleared", [(FIRST,), (BEGINS, BEGINS + FIRST - 1)])
def test_state_that_is_cleared_with_the_last_of_them_has_as_many_again(cleared: Collection[int]) -> None:
    with Training("topk", match_norm=False) as training:
        for number in range(2 * STEPS):
            for optimizer in training.ranks.optimizers if number in cleared else ():
                optimizer.state.clear()
            training.step(number)
        last = max(cleared)
        assert training.exact == sorted({*REGULAR, *range(min(cleared), last + 1 + FIRST)})
        assert training.moment("body")["steps"] == 1 + FIRST


def test_where_all_rounds_are_exact_nothing_is_saved_of_them() -> None:
    with Training(rebuild_every=1) as training:
        for number in range(BEGINS):
            training.step(number)
        assert not training.ranks.steps[0].state().get("unused")


def test_one_that_is_used_seldom_has_them_once() -> None:
    with Training("topk") as training:
        for number in range(2 * STEPS):
            training.step(number, without=[] if number % 10 == FIRST - 1 else ["late"])
        assert training.exact == [*range(2 * FIRST + 1)]


def test_state_that_is_cleared_begins_with_exact_rounds_at_once() -> None:
    with Training() as training:
        for number in range(STEPS):
            for optimizer in training.ranks.optimizers if number == BEGINS else ():
                optimizer.state.clear()
            training.step(number)
        assert training.exact == [*REGULAR, *range(BEGINS, BEGINS + FIRST)]


@pytest.mark.parametrize(("method", "make"), [("topk", adam), ("powersgd", adam), ("topk", ADAMAX)])
def test_behind_zeros_it_begins_with_exact_rounds_too(method: str, make: Any) -> None:
    """As of a layer that the loss comes to later, where unused parameters have zeros."""
    with Training(method, make, match_norm=False) as training:
        for number in range(BEGINS):
            training.step(number, zeros=["late"])
        before = training.weights()["late"]
        training.step(BEGINS)
        assert 0 < float((before - training.weights()["late"]).abs().max()) <= RATE
        results = [training.step(number)["late"] for number in range(BEGINS + 1, STEPS)]
        assert training.exact == [*REGULAR, *range(BEGINS + 1, BEGINS + 1 + FIRST)]
        if make is adam:
            torch.testing.assert_close(training.moment("late")["moment"].double(), second_moment(results[:FIRST]))


@pytest.mark.parametrize("given", ["without", "zeros"])
@pytest.mark.parametrize("method", ["marsit", "topk", "signum"])
def test_one_that_is_used_once_has_exact_rounds_once(method: str, given: Any) -> None:
    """What a code, or its momentum, sends of that gradient later is no other first one."""
    with Training(method) as training:
        for number in range(2 * STEPS):
            training.step(number, **({} if number == BEGINS else {given: ["late"]}))
        assert training.exact == [*REGULAR, *range(BEGINS + 1, BEGINS + 1 + FIRST)]


@pytest.mark.parametrize("given", ["without", "zeros"])
@pytest.mark.parametrize("method", ["marsit", "topk"])
def test_one_that_is_seldom_used_moves_each_time_and_has_exact_rounds_once(method: str, given: Any) -> None:
    """As an expert, or the head of a task: always between exact rounds, none of which sees a gradient of it."""
    with Training(method, match_norm=False) as training:
        for number in range(3 * STEPS):
            before, used = training.weights()["late"], number >= BEGINS and number % 10 == 0
            training.step(number, **({} if used else {given: ["late"]}))
            assert not used or not torch.equal(before, training.weights()["late"])
        assert training.exact == [*REGULAR, *range(BEGINS + 1, BEGINS + 1 + FIRST), FIRST + 50]


@each_value
@pytest.mark.parametrize("make", [adam, ADAGRAD])
@pytest.mark.parametrize("given", ["without", "zeros"])
@pytest.mark.parametrize("method", ["marsit", "terngrad", "topk", "powersgd"])
def test_one_that_no_exact_round_sees_learns_from_coded_gradients(method: str, given: Any, make: Any) -> None:
    """Coded zeros say of no element that it has no gradient: none is withheld, and none moves as far as it may."""
    with Training(method, make, match_norm=False) as training:
        start = training.weights()["late"]
        for number in range(6 * STEPS):
            before, used = training.weights()["late"], number >= BEGINS and number % 10 == 0
            training.step(number, **({} if used else {given: ["late"]}))
            assert float((training.weights()["late"] - before).abs().max()) <= 2 * RATE
        moved = float((training.weights()["late"] != start).double().mean())
        assert method == "topk" or moved > 0.9, moved


@pytest.mark.parametrize("method", ["marsit", "signum", "terngrad"])
def test_elements_without_a_gradient_stay_where_they_are_behind_exact_rounds(method: str) -> None:
    """As those of pruned weights, which a coded gradient has perhaps moved."""
    with Training(method, match_norm=False, dead=True) as training:
        for number in range(2 * STEPS):
            if number == BEGINS + FIRST:
                before = training.weights()["late"]
            training.step(number, without=["late"] if number < BEGINS else [])
        moved = training.weights()["late"] != before
        assert not bool(moved[:, ::2].any()) and bool(moved[:, 1::2].any())


def test_it_has_one_exact_round_where_the_training_begins_with_one() -> None:
    with Training(warmup_steps=1) as training:
        for number in range(STEPS):
            training.step(number, without=["late"] if number < BEGINS else [])
        assert training.exact == [0, 1, BEGINS + 1]


def test_what_adagrad_begins_with_stays() -> None:
    with Training(make=partial(torch.optim.Adagrad, lr=RATE, initial_accumulator_value=64.0)) as training:
        for number in range(BEGINS + 2):
            training.step(number, without=["late"] if number < BEGINS else [])
        assert float(training.moment("late")["moment"].min()) >= 64.0


def test_a_program_may_make_its_steps_in_inference_mode() -> None:
    with Training() as training:
        for optimizer in training.ranks.optimizers:
            optimizer.step = torch.inference_mode()(optimizer.step)
        for number in range(STEPS):
            training.step(number, without=["late"] if number < BEGINS else [])
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


@each_value
@pytest.mark.parametrize("make", [adam, ADAGRAD])
@pytest.mark.parametrize("given", ["without", "zeros"])
@pytest.mark.parametrize("saved", range(BEGINS, BEGINS + FIRST + 3))
def test_a_resume_amid_them_has_the_same_bits(saved: int, given: Any, make: Any) -> None:
    with Training("terngrad", make) as whole, Training("terngrad", make) as resumed:
        for number in range(STEPS):
            unused: Any = {given: ["late"]} if number < BEGINS or number == BEGINS + 2 else {}
            whole.step(number, **unused)
            if number >= saved:
                resumed.step(number, **unused)
            elif number == saved - 1:
                Checkpoint.of(whole.ranks).resume(resumed.ranks)
        assert resumed.exact == [number for number in whole.exact if number >= saved]
        assert all(torch.equal(one, resumed.weights()[name]) for name, one in whole.weights().items())


@pytest.mark.parametrize("saved", range(FIRST, 2 * FIRST + 3))
def test_a_resume_amid_those_that_follow_the_start_has_the_same_bits(saved: int) -> None:
    with Training("topk") as whole, Training("topk") as resumed:
        for number in range(STEPS):
            without = ["late"] if number < FIRST else []
            whole.step(number, without=without)
            if number >= saved:
                resumed.step(number, without=without)
            elif number == saved - 1:
                Checkpoint.of(whole.ranks).resume(resumed.ranks)
        assert whole.exact == [*range(2 * FIRST + 1)]
        assert resumed.exact == [number for number in whole.exact if number >= saved]
        assert all(torch.equal(one, resumed.weights()[name]) for name, one in whole.weights().items())


def test_what_waits_has_the_units_of_what_is_held_where_state_is_cleared_in_a_step() -> None:
    """Between the first gradient and the step: it is held again at once, by another divisor."""
    with Training("topk", match_norm=False) as training:
        for number in range(BEGINS):
            training.step(number)
        optimizers = training.ranks.optimizers
        handles = [one.register_step_pre_hook(lambda one, *given: one.state.clear()) for one in optimizers]
        training.step(BEGINS)
        for handle in handles:
            handle.remove()
        before, by = training.ranks.fleet.residuals()[0], training.ranks.steps[0].divisors()
        training.step(BEGINS + 1)
        after, then = training.ranks.fleet.residuals()[0], training.ranks.steps[0].divisors()
    for name in ("body", "late"):
        waits, waited = after[name].view(-1) * then[name], before[name].view(-1) * by[name]
        torch.testing.assert_close(waits, waited)


def test_rank_0_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "horovod_compress")
    with Training() as training:
        for number in range(STEPS):
            training.step(number, without=["late"] if number < BEGINS else [])
    told = [text for text in caplog.messages if "begins only now" in text]
    assert told == ["a second moment begins only now, that of late: the next 4 rounds are exact, as at the start"]


def test_the_norm_of_residuals_is_in_units_of_gradients() -> None:
    """What waits for rows with small gradients is divided by less than what waits for others."""
    tensors = [spec("embedding", 20, 64)]
    with Ranks(tensors, "marsit", adam, MEET, WORLD, min_elements=1) as ranks:
        for number in range(FIRST + 4):
            grads = random_grads(WORLD, tensors, seed=number)
            for mine in grads:
                mine["embedding"][3:] *= 1e-3
            ranks.step(grads)
        kept, divisors = ranks.fleet.reducers[0].kept, ranks.steps[0].divisors()
        norm, undivided = kept.residual_norm(divisors), kept.residual_norm({})
        assert norm == pytest.approx(float((kept.residuals()["embedding"] * divisors["embedding"]).norm()))
        assert norm > 0 and norm != pytest.approx(undivided, rel=0.2), "the control"
