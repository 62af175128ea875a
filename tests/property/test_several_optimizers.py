"""Several optimizers on one compression are one optimizer with as many groups, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from horovod_compress.engine.optimizer.held_moment import HeldMoment
from horovod_compress.errors import ConfigError, StateError
from tests.golden.trained import HELD, Ranks
from tests.support.local import random_grads, spec
from tests.support.marks import slow
from tests.support.states import resealed

WORLD, STEPS, MIDDLE = 2, 9, 5
TENSORS = [spec("embedding", 20, 6), spec("first", 30, 7), spec("bias", 7), spec("last", 9, 30)]
RATES = ((0.02, 0.01), (0.02, 0.01), (0.015, 0.01), (0.01, 0.03), (0.01, 0.03), (0.012, 0.02))

Made = Callable[[Any], Any]
Making = Callable[[Any, float, float], torch.optim.Optimizer]


def divided(parameters: Any) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    mine = list(parameters)
    return mine[1:], mine[:1]


def in_groups(make: Making) -> Made:
    """Return what makes one optimizer with two groups."""

    def made(parameters: Any) -> Any:
        body, embedding = divided(parameters)
        return make([{"params": body}, {"params": embedding, "lr": 0.01, "weight_decay": 0.25}], 0.02, 0.125)

    return made


def apart(make: Making) -> Made:
    """Return what makes two optimizers with the same options."""

    def made(parameters: Any) -> Any:
        body, embedding = divided(parameters)
        return [make(body, 0.02, 0.125), make(embedding, 0.01, 0.25)]

    return made


def adamw(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, betas=(0.75, 0.875))


def sgd(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay)


def heavy(parameters: Any, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, weight_decay=weight_decay, momentum=0.5)


CASES: dict[str, tuple[Making, str, dict[str, Any], dict[str, Any]]] = {
    "held": (adamw, "marsit", HELD | {"step": "torch"}, {"step_scale": 1.5}),  # whose results V does not take in
    "held, moved here": (adamw, "signsgd", HELD | {"step": "auto"}, {}),
    "with its rate": (sgd, "gmc", {}, {"density": 0.1, "momentum": 0.5}),
    "residuals with the rate": (sgd, "topk", {}, {"density": 0.1, "follow_lr": True}),
    "exact first": (heavy, "ef_signsgd", {}, {"total_steps": 40}),
}


def groups_of(made: Any) -> Iterator[dict[str, Any]]:
    for optimizer in made if isinstance(made, list) else [made]:
        yield from optimizer.param_groups


def play(ranks: Ranks, first: int, last: int, *, backwards: bool = False) -> None:
    for step in range(first, last):
        for made in ranks.optimizers:
            groups = list(groups_of(made))
            for group, rate in zip(groups[::-1] if backwards else groups, RATES[step % len(RATES)], strict=True):
                group["lr"] = rate
        ranks.step(random_grads(WORLD, TENSORS, seed=step))


def ranks_of(made: Made, case: str, **other: Any) -> Ranks:
    _, method, meet, options = CASES[case]
    return Ranks(TENSORS, method, made, meet | other, WORLD, min_elements=10, **options)


def found(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Return the weights and all that is kept of the first rank."""
    kept = ranks.fleet.reducers[0].kept.states()
    moments = ranks.steps[0].state().get("second_moment", {})
    return (
        {name: parameter.detach().clone() for name, parameter in ranks.models[0].items()}
        | {f"{kind} {name}": tensor.clone() for kind, of in kept.items() for name, tensor in of.items()}
        | {f"moment {name}": moment["moment"] for name, moment in moments.items()}
    )


def equal(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert mine.keys() == other.keys()
    return all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("case", CASES)
def test_they_are_one_optimizer_with_groups(case: str) -> None:
    make = CASES[case][0]
    ends = []
    for made in (in_groups(make), apart(make), lambda parameters: in_groups(make)(reversed(list(parameters)))):
        with ranks_of(made, case) as ranks:
            play(ranks, 0, STEPS)
            ends.append((found(ranks), ranks.steps[0].state().get("norms")))
    (mine, norms), (other, theirs), (control, _) = ends
    assert equal(mine, other) and norms == theirs
    assert not equal(mine, control), "the control: other parameters have the second group's options"
    assert any(name.startswith("moment") for name in mine) == case.startswith("held")


@pytest.mark.parametrize("case", ["held", "with its rate"])
def test_a_resume_is_exact(case: str) -> None:
    made = apart(CASES[case][0])
    with ranks_of(made, case) as whole, ranks_of(made, case) as resumed:
        play(whole, 0, MIDDLE)
        resume(whole, resumed)
        for ranks in (whole, resumed):
            play(ranks, MIDDLE, STEPS)
        assert equal(found(whole), found(resumed))


def exchange(ranks: Ranks, number: int) -> bool:
    """Exchange gradients, which nobody uses yet; return whether the round was exact."""
    for steps in ranks.steps:
        steps.settle_moments()
        steps.begin()
    results = ranks.fleet.step(random_grads(WORLD, TENSORS, seed=number))
    assert all(reducer.wait_idle(5.0) for reducer in ranks.fleet.reducers)
    for model, result in zip(ranks.models, results, strict=True):
        for name, parameter in model.items():
            parameter.grad = result[name].clone()
    held = ranks.steps[0].held
    return held is not None and held.exact


def test_a_resume_is_exact_where_the_second_one_has_just_made_its_first_step() -> None:
    """Nothing of it is held yet, and the exact rounds of the start are long over: it has some of its own."""

    def do(ranks: Ranks, number: int) -> bool:
        exact = exchange(ranks, number)
        for optimizer in (one for mine in ranks.optimizers for one in mine[: 1 + (number >= MIDDLE)]):
            optimizer.step()
            optimizer.zero_grad()
        return exact

    made, meet = apart(adamw), {"rebuild_every": 50, "match_norm": False}
    with ranks_of(made, "held", **meet) as whole, ranks_of(made, "held", **meet) as resumed:
        for number in range(MIDDLE + 1):
            do(whole, number)
        resume(whole, resumed)
        for number in range(MIDDLE + 1, STEPS):
            assert do(whole, number) == do(resumed, number)
        assert equal(found(whole), found(resumed))


#: In the exact rounds 0 to 3 and 12 to 14, which one of them has used and the other has not, and between the two.
QUICK = (3, 8, 13, 14)


@pytest.mark.parametrize("saved", [*QUICK, *slow(*(at for at in range(2, 2 * STEPS) if at not in QUICK))])
def test_a_resume_is_exact_where_they_step_in_turn(saved: int) -> None:
    """An exact round is due for the one that has used none, and no longer for the other."""

    def do(ranks: Ranks, number: int) -> bool:
        exact = exchange(ranks, number)
        for mine in ranks.optimizers:
            mine[number % 2].step()
            for optimizer in mine:
                optimizer.zero_grad()
        return exact

    made, meet = apart(adamw), {"rebuild_every": 10, "match_norm": False}
    with ranks_of(made, "held", **meet) as whole, ranks_of(made, "held", **meet) as resumed:
        for number in range(saved):
            do(whole, number)
        resume(whole, resumed)
        for number in range(saved, 2 * STEPS):
            assert do(whole, number) == do(resumed, number)
        assert equal(found(whole), found(resumed))


def resume(whole: Ranks, resumed: Ranks, *, by_place: bool = False) -> None:
    """Go on where others are, whose optimizers may have another order.

    Args:
        by_place: learning rates were saved by the places of groups, as those of one optimizer are.
    """
    states = copy.deepcopy(whole.save())
    for at, mine in enumerate(resumed.optimizers):
        for name, parameter in resumed.models[at].items():
            parameter.data.copy_(whole.models[at][name].data)
        for optimizer in mine:
            saved = next(other for other in whole.optimizers[at] if shapes_of(other) == shapes_of(optimizer))
            optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    for state in states if by_place else ():
        for kind in ("rates", "last_rates"):
            rates = state[kind]
            state[kind] = [rates[name] for name in ("first", "embedding")]
    resumed.load([resealed(state) for state in states])


def shapes_of(optimizer: torch.optim.Optimizer) -> list[torch.Size]:
    return [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]


@pytest.mark.parametrize("by_place", [False, True])
def test_a_resume_may_have_them_in_another_order(by_place: bool) -> None:
    """What is kept follows the learning rates of its own parameters; by their places, these were the other's."""
    case = "with its rate"
    made = apart(CASES[case][0])
    with ranks_of(made, case) as whole, ranks_of(lambda given: made(given)[::-1], case) as resumed:
        play(whole, 0, MIDDLE)
        resume(whole, resumed, by_place=by_place)
        play(whole, MIDDLE, STEPS)
        play(resumed, MIDDLE, STEPS, backwards=True)
        assert equal(found(whole), found(resumed)) is not by_place


def test_a_resume_with_one_of_two_groups_goes_on_by_place_or_by_name() -> None:
    case = "with its rate"
    make = CASES[case][0]
    ends = []
    for first, then in ((in_groups(make), apart(make)), (apart(make), in_groups(make))):
        with ranks_of(first, case) as whole, ranks_of(then, case) as resumed:
            play(whole, 0, MIDDLE)
            for at, model in enumerate(resumed.models):
                for name, parameter in model.items():
                    parameter.data.copy_(whole.models[at][name].data)
            resumed.load(copy.deepcopy(whole.save()))
            for ranks in (whole, resumed):
                play(ranks, MIDDLE, STEPS)
            ends += [found(whole), found(resumed)]
    assert all(equal(ends[0], other) for other in ends[1:])


@pytest.mark.parametrize("steps_in_vain", [False, True])
@pytest.mark.parametrize("case", ["held", "with its rate"])
def test_a_group_may_be_added_between_a_load_and_the_first_gradient(case: str, steps_in_vain: bool) -> None:
    """What was saved of its parameters is theirs all the same, also behind a step that has nothing to use."""
    make = CASES[case][0]

    def without_last(parameters: Any) -> Any:
        first = list(parameters)[:-1]
        return [make(first[1:], 0.02, 0.125), make(first[:1], 0.01, 0.25)]

    def add_last(ranks: Ranks) -> None:
        for model, (first, _) in zip(ranks.models, ranks.optimizers, strict=True):
            first.add_param_group({"params": [model["last"]]})

    with ranks_of(without_last, case) as whole, ranks_of(without_last, case) as resumed:
        add_last(whole)
        for number in range(STEPS):
            if number == MIDDLE:
                resumed.load(copy.deepcopy(whole.save()))
                assert resumed.steps[0].state().get("rates") == whole.steps[0].state().get("rates"), "saved again"
                for optimizer in (one for mine in resumed.optimizers for one in mine if steps_in_vain):
                    optimizer.step()
                add_last(resumed)
                for steps in resumed.steps:
                    steps.settle_moments()
                saved = whole.steps[0].state()
                assert resumed.steps[0].state().get("second_moment", {}).keys() == saved.get("second_moment", {}).keys()
                assert resumed.steps[0].state().get("rates") == saved.get("rates")
            whole.step(random_grads(WORLD, TENSORS, seed=number))


@pytest.mark.parametrize("saved", [5, 8, 9, 10])
@pytest.mark.parametrize("again", [False, True])
def test_a_step_between_a_load_and_the_first_gradient_is_not_undone(saved: int, again: bool) -> None:
    """It was saved between an exchange and the step that uses it."""

    def use(ranks: Ranks) -> None:
        for optimizer in (one for mine in ranks.optimizers for one in mine):
            optimizer.step()

    made, meet = apart(adamw), {"warmup_steps": 4, "rebuild_every": 5, "match_norm": False}
    with ranks_of(made, "held", **meet) as whole, ranks_of(made, "held", **meet) as resumed:
        for number in range(saved):
            exchange(whole, number)
            if number + 1 < saved:
                use(whole)
        resume(whole, resumed)
        for mine, others in zip(resumed.models, whole.models, strict=True):
            for name, parameter in mine.items():
                parameter.grad = copy.deepcopy(others[name].grad)
        for ranks in (whole, resumed):
            use(ranks)
        if again:
            assert resumed.steps[0].state().get("unused") == whole.steps[0].state().get("unused")
            resume(resumed, resumed)
        for number in range(saved, saved + 8):
            assert exchange(whole, number) == exchange(resumed, number)
            for ranks in (whole, resumed):
                use(ranks)
        assert equal(found(whole), found(resumed))


def test_parameters_of_one_group_have_one_rate() -> None:
    case = "with its rate"
    with ranks_of(apart(sgd), case) as whole, ranks_of(lambda p: sgd(p, 0.02, 0.0), case) as resumed:
        play(whole, 0, MIDDLE)
        with pytest.raises(StateError, match=r"learning rate 0\.03 for embedding and 0\.01 for last, which are in one"):
            resumed.load(whole.save())
        assert not resumed.fleet.reducers[0].step, "and nothing was changed"


@pytest.mark.parametrize("other", [adamw, sgd])
@pytest.mark.parametrize("begun", [False, True])
def test_what_no_optimizer_holds_any_more_is_given_back(other: Making, begun: bool) -> None:
    """After a resume with SGD for the embedding, its residual is of gradients; the control has AdamW as before."""

    def made(parameters: Any) -> Any:
        body, embedding = divided(parameters)
        return [adamw(body, 0.02, 0.125), other(embedding, 0.01, 0.25)]

    with ranks_of(apart(adamw), "held") as saved, ranks_of(made, "held", second_moment="auto") as resumed:
        play(saved, 0, MIDDLE)
        states, before = saved.save(), saved.fleet.residuals()[0]
        for steps, state in zip(resumed.steps, states, strict=True):
            steps.load(state, "restore", begun=begun)
            if not begun:
                assert steps.state()["second_moment"].keys() == state["second_moment"].keys(), "nothing is settled yet"
                steps.settle_moments()
        after, moments = resumed.fleet.residuals()[0], resumed.steps[0].state()["second_moment"]
        same = {name for name in before if torch.equal(before[name], after[name])}
    divisor = HeldMoment(**states[0]["second_moment"]["embedding"]).divisor
    assert divisor is not None and bool(before["embedding"].any())
    held = set(before) if other is adamw else set(before) - {"embedding"}
    assert same == set(moments) == held
    assert other is adamw or torch.equal(after["embedding"], before["embedding"] * divisor)


def test_each_divides_by_its_own_second_moment() -> None:
    """Adam's and Adagrad's are made of other formulas; what SGD takes is not held."""

    def made(parameters: Any) -> Any:
        embedding, first, *others = parameters
        adagrad = torch.optim.Adagrad([embedding], lr=0.01)
        return [torch.optim.AdamW([first], lr=0.01), adagrad, torch.optim.SGD(others, lr=0.01)]

    with Ranks(TENSORS, "marsit", made, HELD | {"second_moment": "auto"}, WORLD, min_elements=10) as ranks:
        play_without_rates(ranks, STEPS)
        moments = ranks.steps[0].state()["second_moment"]
    assert set(moments) == {"embedding", "first"}
    assert float(moments["embedding"]["moment"].mean()) > 3 * float(moments["first"]["moment"].mean()), (
        "a sum of squares"
    )


def play_without_rates(ranks: Ranks, steps: int) -> None:
    for step in range(steps):
        ranks.step(random_grads(WORLD, TENSORS, seed=step))


def test_an_exact_round_is_not_over_before_all_have_used_it() -> None:
    """One that steps less often, as no program should have it, uses exact rounds only as a whole."""
    exact, since = [], []
    with ranks_of(apart(adamw), "held") as ranks:  # rounds 0, 1 and 2 are due, then one in three
        late = [made.pop() for made in ranks.optimizers]
        for step in range(12):
            steps = step < 3 or step % 2 == 0
            for made, other in zip(ranks.optimizers, late, strict=True):
                made[1:] = [other] * steps
            ranks.step(random_grads(WORLD, TENSORS, seed=step))
            exact.append(ranks.steps[0].held.exact)  # type: ignore[union-attr]
            moments = ranks.steps[0].state()["second_moment"] if step > 3 else {}
            since.append([moments[name]["since"] for name in ("first", "embedding") if name in moments])
    assert exact == [True] * 3 + [False] * 2 + [True] * 2 + [False] + [True] * 4
    # The other one's second step behind the third uses rounds 5 and 6, both exact, and its fourth 9 and 10; of 8 and
    # the coded 7 it uses nothing, and its second moment is not due.
    assert since[4] == [3.0, 3.0] and since[6] == [7.0, 5.0] and since[8] == [9.0, 5.0] and since[10] == [11.0, 7.0]


@pytest.mark.parametrize("in_turn", [True, False])
def test_those_that_step_in_turn_have_coded_rounds_too(in_turn: bool) -> None:
    """The step of either one uses two rounds, the second its own: three exact ones have one such pair for each."""
    exact = []
    with ranks_of(apart(adamw), "held", rebuild_every=6) as ranks:  # rounds 0, 1 and 2 are due, then one in six
        made = copy.copy(ranks.optimizers)
        for step in range(18):
            if in_turn and step > 2:
                ranks.optimizers = [[mine[step % 2]] for mine in made]
            ranks.step(random_grads(WORLD, TENSORS, seed=step))
            exact.append(ranks.steps[0].held.exact)  # type: ignore[union-attr]
        since = {moment["since"] for moment in ranks.steps[0].state()["second_moment"].values()}
    rounds = [step for step, was in enumerate(exact) if was]
    assert rounds == [0, 1, 2, *([8, 9, 10, 14, 15, 16] if in_turn else [8, 14])]
    assert since == {10.0 if in_turn else 15.0}, "both have used the last ones"


@pytest.mark.parametrize("others", [True, False])
def test_one_that_makes_no_step_is_not_waited_for(others: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Once the first exact rounds are over, and others have used them; the control: others have not."""
    exact, since = [], []
    with ranks_of(apart(adamw), "held") as ranks:  # rounds 0, 1 and 2 are due, then one in three
        made = copy.copy(ranks.optimizers)
        for step in range(13):
            pausing = step < 9
            ranks.optimizers = [(mine[:1] if others else []) if pausing else mine for mine in made]
            ranks.step(random_grads(WORLD, TENSORS, seed=step))
            exact.append(ranks.steps[0].held.exact)  # type: ignore[union-attr]
            moments = ranks.steps[0].state().get("second_moment", {})
            since.append([moments[name]["since"] for name in ("first", "embedding") if name in moments])
    told = [text for text in caplog.messages if "has used none of" in text]
    if not others:
        assert exact[:9] == [True] * 9, "several exchanges for one step are exact, or none"
        assert not told
        return
    # Its second moment begins with round 9, a coded one: as many are exact behind it as the training begins with, two.
    assert exact == [True] * 3 + [False, False, True, False, False, True, False, True, True, False]
    assert since[8] == [9.0] and since[12] == [12.0, 3.0], "once it makes steps, exact rounds are its own again"
    assert len(told) == 1 and "AdamW has used none of the last 2 exchanges" in told[0]


def test_one_that_never_makes_a_step_is_not_waited_for_behind_the_warm_up() -> None:
    """However rare exact rounds are; one that pauses later is, until as many exchanges have gone by."""
    for pausing, expected in ((range(9), [6]), (range(2, 9), [3, 4, 5, 6])):
        exact = []
        with ranks_of(apart(adamw), "held", rebuild_every=4) as ranks:  # rounds 0, 1 and 2 are due, then one in four
            made = copy.copy(ranks.optimizers)
            for step in range(9):
                ranks.optimizers = [mine[:1] if step in pausing else mine for mine in made]
                ranks.step(random_grads(WORLD, TENSORS, seed=step))
                exact.append(ranks.steps[0].held.exact)  # type: ignore[union-attr]
        assert [step for step, was in enumerate(exact) if was and step > 2] == expected


def test_what_cannot_be_is_refused() -> None:
    with ranks_of(apart(adamw), "held") as ranks:
        steps, (body, embedding) = ranks.steps[0], ranks.optimizers[0]
        for others in ([body], [embedding, body], [body, embedding, torch.optim.SGD(body.param_groups[0]["params"])]):
            with pytest.raises(
                ConfigError, match="already has an optimizer, AdamW and AdamW; give several in one call"
            ):
                steps.meet(others, "auto", None, None)
        steps.meet([body, embedding], "auto", None, None)  # the same ones may be given again

    def twice(parameters: Any) -> Any:
        mine = list(parameters)
        return [sgd(mine[1:], 0.1, 0.0), sgd(mine[:2], 0.1, 0.0)]

    with pytest.raises(ConfigError, match=r"two optimizers have first, and 1 parameter\(s\) in all"):
        ranks_of(twice, "with its rate")
