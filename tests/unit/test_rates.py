"""Residuals follow the learning rate: late gradients count as they would have counted in time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_compress.engine.optimizer import momentum
from horovod_compress.engine.optimizer.momentum import MOST, Rates
from tests.support.local import Fleet, random_grads, spec

TENSORS = [spec("a", 40, 5), spec("b", 70)]
RATES = [0.1, 0.4, 0.4, 0.2, 0.07, 0.07, 0.3]


class Seen:
    """Stands for a reducer and what it keeps, and remembers by what residuals were multiplied."""

    def __init__(self) -> None:
        self.kept, self.factors = self, list[dict[str, float]]()

    def scale_errors(self, factors: dict[str, float]) -> float:
        self.factors.append(factors)
        return 1.0


def optimizer(*groups: float) -> tuple[torch.optim.SGD, list[tuple[str, torch.nn.Parameter]]]:
    named = [(chr(97 + index), torch.nn.Parameter(torch.zeros(3))) for index in range(len(groups))]
    made = [{"params": [p], "lr": lr} for (_, p), lr in zip(named, groups, strict=True)]
    return torch.optim.SGD(made), named


def followed(given: list[float]) -> list[float | None]:
    """Return the factor of every step at these rates, None where nothing was multiplied."""
    sgd, named = optimizer(given[0])
    seen: Any = Seen()
    follower = Rates(sgd, seen.kept, named)
    for rate in given:
        sgd.param_groups[0]["lr"] = rate
        follower.begin()
    return [factors.get("a") for factors in seen.factors]


def applied(method: str, follow: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """Return what plain SGD subtracted, and what no compression would have, less what still waits."""
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    names = [tensor.name for tensor in TENSORS]
    got, wanted = torch.zeros(270, dtype=torch.float64), torch.zeros(270, dtype=torch.float64)
    with Fleet(2, TENSORS, method, **options) as fleet:
        # One optimizer stands for that of every rank: its only group has all tensors.
        followers = [
            Rates(sgd, reducer.kept, [(name, sgd.param_groups[0]["params"][0])])
            for reducer in fleet.reducers
            for name in names
        ]
        for step, rate in enumerate(RATES):
            sgd.param_groups[0]["lr"] = rate
            for follower in followers if follow else ():
                follower.begin()
            grads = random_grads(2, TENSORS, seed=step)
            results = fleet.step(grads)[0]
            got += rate * torch.cat([results[name].double().view(-1) for name in names])
            wanted += rate * torch.cat([(grads[0][n].double() + grads[1][n]).view(-1) / 2 for n in names])
        waits = [torch.cat([kept[name].double() for name in names]) for kept in fleet.residuals()]
    return got, wanted - RATES[-1] * (waits[0] + waits[1]) / 2


@pytest.mark.parametrize(("method", "options"), [("topk", {"density": 0.1}), ("ef_signsgd", {"step_size": "tensor"})])
def test_nothing_counts_at_another_rate_than_its_own(method: str, options: dict[str, Any]) -> None:
    """The sum of rate times gradient is what was applied and what waits; without following it is not."""
    got, wanted = applied(method, True, **options)
    assert torch.allclose(got, wanted, atol=1e-5)
    got, wanted = applied(method, False, **options)
    assert not torch.allclose(got, wanted, atol=1e-2)


def test_small_changes_add_up() -> None:
    assert followed([1.0, 0.98, 0.96, 0.94, 0.92]) == [None, None, None, pytest.approx(1 / 0.94), None]


def test_small_changes_are_followed_at_once_where_momentum_is() -> None:
    """The others follow with them only if a group has both."""
    sgd, named = optimizer(1.0, 1.0)
    seen: Any = Seen()
    follower = Rates(sgd, seen.kept, named, at_once=["b"])
    for rate in (1.0, 0.98, 0.0, 0.98, 0.96):
        for group in sgd.param_groups:
            group["lr"] = rate
        follower.begin()
    assert [sorted(factors) for factors in seen.factors] == [[], ["b"], [], [], ["b"]]
    assert seen.factors[1]["b"] == 1 / 0.98


def test_a_rate_of_nothing_is_passed_over() -> None:
    assert followed([0.0, 1.0, 0.0, 0.5]) == [None, None, None, 2.0]


def test_a_leap_is_bounded() -> None:
    assert followed([1.0, 1e-6, 1.0]) == [None, MOST, 1 / MOST]
    assert followed([1.0, 1e-6, 1e-6, 1e-4, 0.1, 0.05, 1.0]) == [None, MOST, None, 1.0, None, 2.0, 0.05]


def test_what_grew_in_small_steps_shrinks_at_once() -> None:
    """At a warm restart, as behind a warm-up from a tiny rate: else residuals would count many times."""
    assert followed([1.0, 0.125, 0.015625, 1.0]) == [None, 8.0, 8.0, 1 / 64]
    assert followed([0.0009765625, 1.0]) == [None, 1 / 1024]


def test_groups_have_rates_of_their_own_and_may_be_added() -> None:
    sgd, named = optimizer(1.0, 1.0)
    seen: Any = Seen()
    follower = Rates(sgd, seen.kept, named)
    follower.begin()
    sgd.param_groups[1]["lr"] = 0.5
    sgd.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 3.0})
    follower.begin()
    assert seen.factors == [{}, {"b": 2.0}]


def test_what_is_saved_goes_on() -> None:
    sgd, named = optimizer(1.0)
    seen: Any = Seen()
    first, again = Rates(sgd, seen.kept, named), Rates(sgd, seen, named)
    first.begin()
    again.load(first.state())
    sgd.param_groups[0]["lr"] = 1 - momentum.SMALL * 2
    again.begin()
    assert seen.factors == [{}, {"a": pytest.approx(1 / 0.9)}]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_fall_that_was_not_followed_all_the_way_is_not_followed_again_after_a_resume(by_name: bool) -> None:
    sgd, named = optimizer(1.0)
    seen: Any = Seen()
    follower = Rates(sgd, seen.kept, named)
    for rate in (1.0, 1e-3):
        sgd.param_groups[0]["lr"] = rate
        follower.begin()
    for _ in range(2):
        state: dict[str, Any] = follower.state()
        if by_name:  # as those of several optimizers are saved
            state = {name: follower.of_names(rates) for name, rates in follower.by_name().items()}
        follower = Rates(sgd, seen.kept, named)
        follower.load(state)
        follower.begin()
    assert seen.factors == [{}, {"a": MOST}, {}, {}]


def test_what_the_last_step_had_is_saved_only_where_residuals_stand_for_another_rate() -> None:
    sgd, named = optimizer(1.0)
    seen: Any = Seen()
    follower = Rates(sgd, seen.kept, named)
    for rate, saved in ((1.0, []), (0.5, []), (1e-3, [1e-3])):
        sgd.param_groups[0]["lr"] = rate
        follower.begin()
        assert follower.state()["rates_seen"] == saved


def test_momentum_stays_as_it_is() -> None:
    with Fleet(2, TENSORS, "dgc", density=0.1, ramp_steps=0) as fleet:
        fleet.step(random_grads(2, TENSORS))
        before = {
            kind: {n: t.clone() for n, t in kept.items()} for kind, kept in fleet.reducers[0].kept.states().items()
        }
        fleet.reducers[0].kept.scale_errors({"a": 3.0})
        after = fleet.reducers[0].kept.states()
        assert torch.equal(after["momentum"]["a"], before["momentum"]["a"])
        assert torch.equal(after["residual"]["a"], before["residual"]["a"] * 3) and bool(before["residual"]["a"].any())
        assert torch.equal(after["residual"]["b"], before["residual"]["b"])


def test_growth_is_that_of_what_is_there() -> None:
    sgd, named = optimizer(1.0, 1.0)
    with Fleet(2, TENSORS, "topk", density=0.1, min_elements=100) as fleet:  # b is small, and has no residual
        follower = Rates(sgd, fleet.reducers[0].kept, named)
        growth = []
        for rates in ((1.0, 1.0), (1.0, 0.1), (0.25, 0.1), (0.5, 0.1)):
            for group, rate in zip(sgd.param_groups, rates, strict=True):
                group["lr"] = rate
            growth.append(follower.begin())
    assert growth == [1.0, 1.0, 4.0, 1.0]


def test_a_methods_momentum_makes_results_no_larger() -> None:
    sgd, named = optimizer(1.0, 1.0)
    with Fleet(2, TENSORS, "signum") as fleet:
        follower = Rates(sgd, fleet.reducers[0].kept, named)
        assert follower.begin() == 1.0
        for group in sgd.param_groups:
            group["lr"] = 0.25
        assert fleet.reducers[0].kept.states().keys() == {"momentum"} and follower.begin() == 1.0
