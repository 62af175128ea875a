"""A second moment that is held: exact rounds move it, others leave it, and the optimizer stays torch's own."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_compress.codecs.base import variants_of
from horovod_compress.codecs.by_step import by_step
from horovod_compress.codecs.dense import FullPrecision
from horovod_compress.engine.optimizer import held, holding, saved_moments, second_moment
from horovod_compress.engine.optimizer.held_moment import HeldMoment
from horovod_compress.engine.optimizer.second_moment import BOUND
from horovod_compress.engine.optimizer.step_hooks import before_step
from horovod_compress.engine.saved import checkpoint
from horovod_compress.errors import ConfigError, NonFiniteError
from horovod_compress.schedule.plan import Plan, TensorSpec
from tests.support.local import Fleet, all_same, random_grads, spec
from tests.support.marks import each_value, slow
from tests.support.samples import Sample, samples

TENSORS = [spec("weight", 12, 40), spec("bias", 30), spec("cube", 4, 3, 5)]
RATE, BETA2, EPS = 0.01, 0.999, 1e-8
Grads = list[dict[str, Tensor]]
#: Of second moments, by parameter; and of a compression, an optimizer and its second moments, beside the weights.
Moments = dict[str, dict[str, Any]]
Saved = tuple[dict[str, Any], dict[str, Any], Moments, dict[str, Tensor]]


def without(part: str) -> Callable[[Moments], Moments]:
    """Return what leaves a part out of second moments."""
    return lambda moments: {n: {k: v for k, v in m.items() if k != part} for n, m in moments.items()}


class Team:
    """Ranks that train the same model with Adam and compressed gradients, in one process."""

    def __init__(
        self,
        method: str = "marsit",
        world: int = 3,
        warmup: int = 4,
        every: int = 5,
        second_moment: str = "shared",
        make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        options: dict[str, Any] | None = None,
        tensors: list[TensorSpec] = TENSORS,
        memory_format: torch.memory_format = torch.contiguous_format,
        scaled: Callable[[Any], None] = lambda optimizer: None,
        **adam: Any,
    ) -> None:
        torch.manual_seed(3)
        start = {t.name: torch.randn(t.shape, dtype=getattr(torch, t.dtype)) for t in tensors}
        start = {n: w.to(memory_format=memory_format) if w.dim() == 4 else w for n, w in start.items()}
        self.tensors, self._scaled = tensors, scaled
        self.fleet = Fleet(world, tensors, method, verify_every=1, **(options or {}))
        self.models = [
            {name: nn.Parameter(w.clone(memory_format=torch.preserve_format)) for name, w in start.items()}
            for _ in range(world)
        ]
        self.optimizers = [make(model.values(), **{"lr": RATE} | adam) for model in self.models]
        self.held = [
            holding.hold(optimizer, reducer, model.items(), 0, second_moment, warmup, every)
            for optimizer, reducer, model in zip(self.optimizers, self.fleet.reducers, self.models, strict=True)
        ]
        for optimizer, mine in zip(self.optimizers, self.held, strict=True):
            if mine:
                optimizer.register_step_pre_hook(before_step(mine.prepare))

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *error: object) -> None:
        self.fleet.__exit__(None, None, None)

    def step(self, grads: Grads) -> Grads:
        """Do one step with every rank's gradients; return the results."""
        results = self.exchange(grads)
        self.use(results)
        return results

    def exchange(self, grads: Grads) -> Grads:
        for mine, reducer in zip(self.held, self.fleet.reducers, strict=True):
            assert reducer.wait_idle(5.0)
            if mine:
                held.begin([mine], reducer.next_step())
        results = self.fleet.step(grads)
        assert all(reducer.wait_idle(5.0) for reducer in self.fleet.reducers)
        return results

    def use(self, results: Grads) -> None:
        """Let the optimizers step with results, or with sums of them."""
        for model, optimizer, result in zip(self.models, self.optimizers, results, strict=True):
            for name, parameter in model.items():
                parameter.grad = result[name].clone()
            self._scaled(optimizer)
            optimizer.step()
        assert all_same([{n: p.detach() for n, p in model.items()} for model in self.models])

    def run(self, steps: range) -> list[Grads]:
        return [self.step(random_grads(self.fleet.world, self.tensors, seed=step)) for step in steps]

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.models[0].items()}

    def saved(self) -> list[Saved]:
        """Return copies of what each rank saves, its weights last."""
        return [
            (
                *copy.deepcopy(
                    (checkpoint.save(reducer, self.fleet.methods), optimizer.state_dict(), mine.state_dict())
                ),
                self.weights(),
            )
            for reducer, optimizer, mine in zip(self.fleet.reducers, self.optimizers, self.held, strict=True)
            if mine
        ]

    def resume(self, saved: list[Saved], but: Callable[[Moments], Moments] = dict) -> None:
        """Go on with what was saved, of second moments with what is made of them."""
        for rank, (kept, state, moments, weights) in enumerate(saved):
            with torch.no_grad():
                for name, parameter in self.models[rank].items():
                    parameter.copy_(weights[name])
            checkpoint.load(self.fleet.reducers[rank], self.fleet.methods, copy.deepcopy(kept), "restore")
            self.optimizers[rank].load_state_dict(copy.deepcopy(state))
            mine = self.held[rank]
            assert mine
            mine.load_state_dict(but(moments))

    def moment(self, name: str) -> HeldMoment:
        mine = self.held[0]
        assert mine
        return mine._held[name]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad makes tensors without
def test_a_sparse_gradient_moves_the_optimizer_s_own() -> None:
    """Adagrad takes those of an embedding, which every rank has exactly; the second moment of the others is held."""
    rows = spec("rows", 20, 3)
    with Team(tensors=[*TENSORS, rows], make=torch.optim.Adagrad, warmup=2, every=4) as team:
        alone = nn.Parameter(team.models[0]["rows"].detach().clone())
        stock, sums, held_ = torch.optim.Adagrad([alone], lr=RATE), [], []
        for step in range(8):
            for mine, reducer in zip(team.held, team.fleet.reducers, strict=True):
                assert mine
                held.begin([mine], reducer.next_step())
            grads = random_grads(team.fleet.world, TENSORS, seed=step)
            number = team.fleet.offer(grads)
            for reducer in team.fleet.reducers:
                reducer.skip(reducer.plan.names().index("rows"))
            at = torch.tensor([[step, 19 - step]])
            alone.grad = torch.sparse_coo_tensor(at, torch.full((2, 3), 0.5 + step), (20, 3))
            for model, optimizer, reducer, mine in zip(
                team.models, team.optimizers, team.fleet.reducers, grads, strict=True
            ):
                for name in mine:
                    model[name].grad = reducer.result(reducer.plan.names().index(name), number)
                assert reducer.settled()
                model["rows"].grad = alone.grad.clone()
                optimizer.step()
            stock.step()
            assert all(torch.equal(model["rows"], alone) for model in team.models)
            assert torch.equal(team.optimizers[0].state[team.models[0]["rows"]]["sum"], stock.state[alone]["sum"])
            sums.append(float(stock.state[alone]["sum"].sum()))
            held_ += [team.moment("weight").moment.clone()] if step > 2 else []
        assert sums == sorted(set(sums)), "it moves in every step"
        moved = [not torch.equal(one, other) for one, other in pairwise(held_)]
        assert moved == [False, False, True, False], "the control: that of the others in exact rounds, here 2 and 6"


def test_with_exact_rounds_only_it_is_the_stock_optimizer() -> None:
    with Team(every=1) as team:
        results = team.run(range(12))
        assert team.held[0] and all(not r.buckets[0].memory.divisors for r in team.fleet.reducers)
        with Team(every=1, second_moment="own") as stock:
            for result in results:
                assert bool(result[0]["weight"].isfinite().all())
                for model, optimizer in zip(stock.models, stock.optimizers, strict=True):
                    for name, parameter in model.items():
                        parameter.grad = result[0][name].clone()
                    optimizer.step()
            assert all_same([team.weights(), stock.weights()])


@pytest.mark.parametrize(
    ("make", "adam"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"foreach": True}),
        *slow(
            (torch.optim.Adam, {"weight_decay": 0.1}),
            (torch.optim.AdamW, {"weight_decay": 0.1, "maximize": True}),
            (torch.optim.Adam, {"fused": True, "betas": (0.8, 0.95)}),
        ),
    ],
)
def test_the_optimizer_divides_by_what_is_held(make: Any, adam: dict[str, Any]) -> None:
    """Unless a moment of the gradient is so large that no second moment could be that small."""
    decay, free = adam.get("weight_decay", 0.0) if make is torch.optim.Adam else 0.0, 0
    with Team(make=make, **adam) as team:
        team.run(range(8))
        for step in range(8, 20):
            before = team.weights()
            team.step(random_grads(3, TENSORS, seed=step))
            exact = team.held[0].is_exact(step)  # type: ignore[union-attr]
            for name, parameter in team.models[0].items():
                state, mine = team.optimizers[0].state[parameter], team.moment(name)
                beta1, beta2 = adam.get("betas", (0.9, BETA2))
                now = float(state["step"])
                assert now == step + 1
                divides = (state["exp_avg_sq"] / (1 - beta2**now)).sqrt()
                first = state["exp_avg"].abs() / (1 - beta1**now) / BOUND
                grad = parameter.grad + decay * before[name]  # type: ignore[operator]
                own = grad.abs() * ((1 - beta2) / (1 - beta2**now)) ** 0.5
                due = torch.maximum((mine.moment if exact else mine.squares()).sqrt(), torch.maximum(first, own))
                torch.testing.assert_close(divides, due, rtol=1e-3, atol=0.0)
                free += int((divides > torch.maximum(first, own) * 1.01).sum())
        assert free > 300  # the control: what is held decides somewhere


def test_the_second_moment_moves_in_exact_rounds_only_and_is_that_of_the_mean() -> None:
    with Team() as team:
        team.run(range(6))
        before = team.moment("weight").moment.clone()
        team.run(range(6, 9))
        assert torch.equal(team.moment("weight").moment, before) and team.moment("weight").steps == 5
        grads = random_grads(3, TENSORS, seed=9)
        team.step(grads)
        mean = torch.stack([mine["weight"] for mine in grads]).mean(0)
        keep = BETA2**5
        due = (before * (1 - BETA2**5) * keep + (1 - keep) * mean**2) / (1 - BETA2**10)
        assert torch.allclose(team.moment("weight").moment, due, rtol=0.03) and team.moment("weight").steps == 10


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_in_one_exact_round_the_second_moment_forgets_at_most_a_tenth(beta2: float) -> None:
    """Else it would be little more than the square of one gradient where b2 is small."""
    with Team(every=50, betas=(0.9, beta2)) as team:
        team.run(range(54))
        before = team.moment("weight").moment.double()
        result = team.step(random_grads(3, TENSORS, seed=54))[0]["weight"].double()
        counts = {0.95: 2.0, 0.999: 50.0}[beta2]
        keep, mine = beta2**counts, team.moment("weight")
        share = 1 - beta2 ** (mine.steps - counts)
        expected = (before * share * keep + (1 - keep) * result.square()) / (1 - beta2**mine.steps)
        assert mine.since == 55 and 1 - keep < 0.1 + 1e-9
        assert torch.allclose(mine.moment.double(), expected, rtol=1e-4)


@pytest.mark.parametrize("method", ["topk", "powersgd", "onebit_adam", *slow("ef_signsgd", "stc")])
def test_what_waits_keeps_its_meaning_when_the_second_moment_moves(method: str) -> None:
    """Summed over the steps, results and what waits are the ranks' mean gradients."""
    with Team(method, options={"density": 0.1} if method in ("topk", "stc") else {}) as team:
        sums = {t.name: torch.zeros(t.shape, dtype=torch.float64) for t in TENSORS}
        for step in range(16):
            grads = random_grads(3, TENSORS, seed=step)
            results = team.step(grads)
            if team.held[0].is_exact(step):  # type: ignore[union-attr]
                continue  # but for rounding to bfloat16
            for name in sums:
                sums[name] += torch.stack([mine[name] for mine in grads]).double().mean(0) - results[0][name]
        for name, total in sums.items():
            waits = torch.stack([residuals[name] for residuals in team.fleet.residuals()]).double().mean(0)
            for reducer in team.fleet.reducers:  # what owners keep is of the mean
                waits += reducer.kept.states().get("server", {}).get(name, torch.zeros(1)).double()
            divisor = team.moment(name).divisor
            if method == "powersgd":  # which only the optimizer divides after
                assert divisor is None and torch.allclose(waits.view(total.shape), total, atol=1e-4)
                continue
            assert divisor is not None
            assert torch.allclose((waits * divisor).view(total.shape), total, atol=1e-4)
            assert not torch.allclose(waits.view(total.shape), total, atol=1e-4)  # the control: units matter


def surging(step: int, at: int = 7, times: float = 20.0) -> Grads:
    """Return gradients of three ranks, of which those of one step are so many times as large."""
    return [
        {name: grad * (times if step == at else 1.0) for name, grad in mine.items()}
        for mine in random_grads(3, TENSORS, seed=step)
    ]


def test_what_is_held_takes_in_a_surge_as_adam_does() -> None:
    """By rows, for one step; the next exact round counts for the others. Sparse results, the control, are no surges."""
    later = by_step({0: "none", 3: "topk"})
    for method, dense in (("marsit", True), ("topk", False), (later, False)):
        with Team(method) as team:  # type: ignore[arg-type]  # rounds 0 to 4 are exact, and 9
            for step in range(7):
                team.step(surging(step))
            before = team.moment("weight").moment.clone()
            square = team.step(surging(7))[0]["weight"].square().mean(1, keepdim=True)
            rows = before.mean(1, keepdim=True)
            due = (rows * (1 - BETA2**5) * BETA2 + (1 - BETA2) * square) / (1 - BETA2**6) if dense else rows
            assert torch.allclose(team.moment("weight").moment, due * before / rows, rtol=1e-4)
            assert team.moment("weight").steps == 5 + dense
            team.step(surging(8))
            team.step(surging(9))
            assert team.moment("weight").steps == team.moment("weight").since == 10


def test_the_first_coded_result_may_be_a_surge() -> None:
    """Nothing is usual yet; the control is a result of ordinary size."""
    for first, steps in ((5, 6), (7, 5)):
        with Team() as team:
            for step in range(6):
                team.step(surging(step, at=first))
            assert team.moment("weight").steps == steps


def test_the_steps_behind_a_surge_are_as_short_as_adam_s() -> None:
    """Of exact results; the control does not look for surges."""
    moved = []
    for looks in (True, False):
        with Team("qsgd", options={"bits": 7}, every=100) as team, pytest.MonkeyPatch.context() as patch:
            if not looks:
                patch.setattr(held, "surges", lambda results: frozenset())
            stock = {name: nn.Parameter(weight) for name, weight in team.weights().items()}
            adam = torch.optim.Adam(stock.values(), lr=RATE)
            for step in range(12):
                grads = surging(step)
                for name, parameter in stock.items():
                    parameter.grad = torch.stack([mine[name] for mine in grads]).mean(0)
                adam.step()
                team.step(grads)
            moved.append(float((team.weights()["weight"] - stock["weight"].detach()).norm()))
    assert moved[0] < 0.3 * moved[1], moved


@pytest.mark.parametrize("method", ["onebit_adam", *slow("ef_signsgd", "onebit")])
def test_nothing_is_lost_in_a_surge(method: str) -> None:
    """Summed over the steps, results and what waits are the ranks' mean gradients."""
    with Team(method) as team:
        sums = {t.name: torch.zeros(t.shape, dtype=torch.float64) for t in TENSORS}
        for step in range(9):
            results = team.step(grads := surging(step))
            for name in sums if step > 4 else ():
                sums[name] += torch.stack([mine[name] for mine in grads]).double().mean(0) - results[0][name]
        for name, total in sums.items():
            waits = torch.stack([residuals[name] for residuals in team.fleet.residuals()]).double().mean(0)
            for reducer in team.fleet.reducers:
                waits += reducer.kept.states().get("server", {}).get(name, torch.zeros(1)).double()
            assert team.moment(name).steps > 5  # it was one
            divisor = team.moment(name).divisor
            assert divisor is not None and torch.allclose((waits * divisor).view(total.shape), total, atol=1e-3)


def test_ranks_compare_what_is_usual() -> None:
    with Team() as team:
        for step in range(7):
            team.step(surging(step))
        mine, other, _ = team.held
        assert mine and other and mine.settings() == other.settings()
        other._held["bias"].usual *= 1.5  # a state of another time was loaded
        assert mine.settings() != other.settings()


def test_a_surge_may_be_of_any_layout() -> None:
    tensors = [spec("kernel", 6, 4, 3, 3)]
    with Team(tensors=tensors, memory_format=torch.channels_last) as team:
        for step in range(9):
            grads = random_grads(3, tensors, seed=step)
            for mine in grads:
                mine["kernel"] = (20.0 if step == 7 else 1.0) * mine["kernel"].to(memory_format=torch.channels_last)
            team.step(grads)
        assert team.moment("kernel").steps > 5  # it was one


def test_a_surge_that_is_not_finite_moves_nothing() -> None:
    with Team() as team:
        for step in range(7):
            team.step(surging(step))
        before = team.moment("weight").moment.clone()
        results = team.exchange(surging(7))
        for result in results:
            result["weight"][0, 0] = torch.nan
        with contextlib.suppress(AssertionError):  # weights that are not finite are not equal
            team.use(results)
        assert torch.equal(team.moment("weight").moment, before) and team.moment("weight").steps == 5
        assert team.moment("bias").steps == 6  # the control


def test_what_is_usual_is_saved() -> None:
    """The control has not: it does not know a surge that comes first, unless it is very large."""
    with Team() as team:
        for step in range(7):
            team.step(surging(step))
        saved = team.saved()
        team.step(surging(7, times=6.0))
        whole, steps = team.weights(), team.moment("weight").steps
    for forgets in (False, True):
        with Team() as again:
            again.resume(saved, without("usual") if forgets else dict)
            again.step(surging(7, times=6.0))
            assert all_same([whole, again.weights()]) is not forgets
            assert (again.moment("weight").steps == steps == 6) is not forgets


@pytest.mark.parametrize("method", ["marsit", "topk", *slow("ef_signsgd", "powersgd", "sketch_fusion", "signsgd")])
def test_no_weight_moves_by_more_than_ten_rates(method: str) -> None:
    """Dead inputs, rows that are seen once or late, and a gradient that is suddenly a million times larger."""
    with Team(method, world=2, warmup=3, every=7) as team:
        for step in range(40):
            grads = random_grads(2, TENSORS, seed=step)
            for mine in grads:
                mine["weight"][:, 5] = 0
                mine["weight"][2] *= step == 9
                mine["weight"][3] *= step >= 17
                mine["weight"][4] *= 1e-20
                mine["bias"] *= 1e6 if step == 23 else 1.0
            before = team.weights()
            team.step(grads)
            for name, after in team.weights().items():
                moved = (after - before[name]).abs().max()
                assert bool(after.isfinite().all()) and float(moved) <= BOUND * RATE * 1.001, (name, step)


@pytest.mark.parametrize("at", [2, 4, 6, *slow(3, 5, 9, 10)])
def test_resume_is_exact(at: int) -> None:
    with Team() as team:
        team.run(range(at))
        saved = team.saved()
        team.run(range(at, 16))
        whole = team.weights()
    for forget in (False, True):
        with Team() as again:
            again.resume(saved, (lambda moments: {}) if forget else dict)
            again.run(range(at, 16))
            assert all_same([whole, again.weights()]) is (not forget or at <= 5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"second_moment": "local"}, 'should be "auto", "shared" or "own", got \'local\''),
        ({"warmup": 0}, "warmup_steps should be a whole number, at least 1, got 0"),
        ({"every": True}, "rebuild_every should be a whole number, at least 1, got True"),
        ({"make": torch.optim.SGD}, 'second_moment="shared" is for Adam, AdamW, NAdam, .* without amsgrad; got SGD'),
    ],
)
def test_refusals(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Team(**given)


@pytest.mark.parametrize(
    ("method", "given", "holds"),
    [
        ("marsit", {}, True),
        ("powersgd", {}, True),
        ("none", {}, False),
        ("fp16", {}, False),
        ("global_qsgd", {}, False),
        ("marsit", {"make": torch.optim.SGD}, False),
        ("marsit", {"second_moment": "own"}, False),
        ("marsit", {"make": type("Renamed", (torch.optim.AdamW,), {})}, True),
        ("marsit", {"make": type("Other", (torch.optim.AdamW,), {"step": lambda self: None})}, False),
    ],
)
def test_auto_shares_it_where_it_is_needed(method: str, given: dict[str, Any], holds: bool) -> None:
    with Team(method, **{"second_moment": "auto"} | given) as team:
        assert all(bool(mine) is holds for mine in team.held)


def test_marsit_s_own_full_precision_rounds_are_left_out() -> None:
    """The exact rounds take their place, after a warm-up too."""
    for options in ({}, {"warmup_steps": 6}):
        with Team(options={"full_precision_every": 3} | options, warmup=2, every=7) as team:
            for step in range(24):
                team.step(random_grads(3, TENSORS, seed=step))
                mine = team.held[0]
                assert mine and mine.rounds.warmup == options.get("warmup_steps", 2)
                exact = mine.is_exact(step)
                assert {s.round(step).label for s in team.fleet.reducers[0].buckets} == {"bf16" if exact else "marsit"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_any_type_and_layout_in_memory(dtype: torch.dtype) -> None:
    """Rows are those of the shape, however they lie: channels last gives the weights of the usual layout."""
    tensors = [spec("kernel", 6, 3, 4, 5, dtype=dtype), spec("none", 0, 7, dtype=dtype), spec("one", dtype=dtype)]
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        with Team(tensors=tensors, memory_format=memory_format) as team:
            assert team.models[0]["kernel"].is_contiguous(memory_format=memory_format)
            team.run(range(12))
            assert team.moment("kernel").moment.dtype is torch.promote_types(dtype, torch.float32)
            found.append({name: weight.contiguous() for name, weight in team.weights().items()})
    assert all_same(found) and bool(found[0]["kernel"].isfinite().all())


@pytest.mark.parametrize("method", ["marsit", "topk"])
def test_an_exact_round_that_is_not_finite_moves_nothing(method: str) -> None:
    with Team(method, options={"nonfinite": "raise"}) as team, Team(method) as healthy:
        for both in (team, healthy):
            both.run(range(9))
        assert team.held[0] and team.held[0].is_exact(9)
        before = team.moment("weight").moment.clone()
        grads = random_grads(3, TENSORS, seed=9)
        grads[1]["weight"][2, 3] = math.inf
        with pytest.raises(NonFiniteError):
            team.step(grads)
        assert torch.equal(team.moment("weight").moment, before)
        for reducer in team.fleet.reducers:
            for name in team.models[0]:
                with contextlib.suppress(NonFiniteError):
                    reducer.result(team.fleet._index[name], 9)
        team.run(range(10, 18))  # on every rank the same weights, and finite ones
        assert all(bool(weight.isfinite().all()) for weight in team.weights().values())


@each_value
@pytest.mark.parametrize("method", ["marsit", "topk", "onebit_adam"])
@pytest.mark.parametrize("at", [0, 2, 9])
def test_a_square_that_overflows_stops_one_element_as_in_adam(at: int, method: str) -> None:
    """Its second moment is infinite from then on, and all others go on."""
    with Team(method) as team:
        team.run(range(at))
        assert team.held[0] and team.held[0].is_exact(at)
        grads = random_grads(3, TENSORS, seed=at)
        grads[1]["weight"][2, 3] = 1e30
        team.step(grads)
        before = team.weights()["weight"]
        results = team.run(range(at + 1, at + 12))
        assert all(bool(result.isfinite().all()) for step in results for result in step[0].values())
        weights = team.weights()
        assert all(bool(weight.isfinite().all()) for weight in weights.values())
        moved = weights["weight"] != before
        assert not bool(moved[2, 3]) and int(moved[2].sum()) > 0 and int(moved.sum()) > moved.numel() // 2
        assert int(team.moment("weight").moment.isinf().sum()) == 1
        saved_moments.check_state(team.held[0].state_dict(), {t.name: torch.Size(t.shape) for t in TENSORS}, ())


def test_a_bucket_that_is_left_uncompressed_for_a_while() -> None:
    """What waits goes over to the units of gradients, and back."""
    with Team("topk", options={"density": 0.1}) as team:
        compressed = team.fleet.plan
        plain = Plan(tuple(replace(bucket, plain=True) for bucket in compressed.buckets))
        total = torch.zeros(12, 40, dtype=torch.float64)
        for step in range(18):
            if step in (7, 12):
                for reducer in team.fleet.reducers:
                    assert reducer.wait_idle(5.0)
                    reducer.replan(plain if step == 7 else compressed)
            grads = random_grads(3, TENSORS, seed=step)
            results = team.step(grads)
            mine = team.held[0]
            assert mine and ("weight" in mine._held) is (step in (5, 6, *range(12, 18)))
            if not mine.is_exact(step) or 7 <= step < 12:
                total += torch.stack([g["weight"] for g in grads]).double().mean(0) - results[0]["weight"]
        waits = torch.stack([residuals["weight"] for residuals in team.fleet.residuals()]).double().mean(0)
        divisor = team.moment("weight").divisor
        assert divisor is not None and torch.allclose((waits * divisor).view(12, 40), total, atol=1e-4)


@pytest.mark.parametrize("sample", list(samples()), ids=lambda sample: sample.name)
def test_every_round_of_a_method_divides_at_the_same_place(sample: Sample) -> None:
    """A round that did not would read what another one kept in other units; full-precision rounds are left out."""
    codec = sample.codec()
    rounds = [kind for kind in variants_of(codec) if not isinstance(kind, FullPrecision)]
    assert {kind.properties().divides for kind in rounds} == {codec.properties().divides}


def scaled_by(scale: float, overflow: float = 0.0) -> Callable[[Any], None]:
    """Return what a gradient scaler does before a fused step, which divides and skips by itself."""

    def scaled(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad *= scale
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(overflow)

    return scaled


def test_a_fused_step_may_leave_dividing_to_a_gradient_scaler() -> None:
    with Team(fused=True) as plain, Team(fused=True, scaled=scaled_by(1024.0)) as team:
        plain.run(range(12))
        team.run(range(12))
        assert all_same([plain.weights(), team.weights()])


def test_a_fused_step_that_a_gradient_scaler_skips_changes_nothing() -> None:
    with Team(fused=True) as team:
        team.run(range(8))  # the next round is compressed, the one behind it exact
        team._scaled = scaled_by(1024.0, overflow=1.0)
        for step in (8, 9):
            before, moment = team.weights(), team.moment("weight").moment.clone()
            kept = [state["exp_avg_sq"].clone() for state in team.optimizers[0].state.values()]
            team.step(random_grads(3, TENSORS, seed=step))
            after = [state["exp_avg_sq"] for state in team.optimizers[0].state.values()]
            assert all_same([before, team.weights()]) and torch.equal(moment, team.moment("weight").moment)
            assert all(torch.equal(*both) for both in zip(kept, after, strict=True))
        team._scaled = lambda optimizer: None
        for optimizer in team.optimizers:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        team.run(range(10, 12))
        assert not all_same([before, team.weights()])  # the control


def test_a_later_hook_that_clips_spoils_nothing() -> None:
    def clip(optimizer: Any, *given: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(1e-4)

    with Team() as team:
        for optimizer in team.optimizers:
            optimizer.register_step_pre_hook(clip)
        team.run(range(12))
        states = team.optimizers[0].state.values()
        assert all(bool(state["exp_avg_sq"].ge(0).all()) for state in states)
        assert all(bool(weight.isfinite().all()) for weight in team.weights().values())


def test_without_a_second_beta_there_is_nothing_to_hold() -> None:
    with Team(second_moment="auto", betas=(0.9, 0.0)) as team:
        assert team.held[0] is None
    with pytest.raises(ConfigError, match="second beta above 0"):
        Team(betas=(0.9, 0.0))


@each_value
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("exchanges", [1, 2, 3])
def test_v_moves_by_steps_whose_exchanges_were_all_exact(exchanges: int, skips: bool) -> None:
    """With several for one step of the optimizer, an exact round may be due in the middle of them; a scaler skips."""
    moved = 0
    with Team(warmup=4, every=5) as team:
        for step in range(24):
            before = team.moment("weight").moment.clone() if team.held[0] and team.held[0]._held else None
            total: Grads = [{t.name: torch.zeros(t.shape) for t in team.tensors} for _ in range(team.fleet.world)]
            exact = True
            for number in range(exchanges):
                grads = random_grads(team.fleet.world, team.tensors, seed=exchanges * step + number)
                results = team.exchange(grads)
                mean = torch.stack([mine["weight"] for mine in grads]).mean(0)
                exact = exact and torch.allclose(results[0]["weight"], mean, atol=0.05)  # in 16 bits
                total = [{n: total[r][n] + mine[n] for n in mine} for r, mine in enumerate(results)]
            if skips and step % 4 == 2:
                continue
            team.use(total)
            if before is not None and not torch.equal(before, team.moment("weight").moment):
                assert exact
                moved += 1
    assert moved >= 3  # none is left out


@pytest.mark.parametrize("shape", [(200_000,), (512, 512), (1, 300_000)])
def test_what_to_divide_by_does_not_depend_on_threads(shape: tuple[int, ...]) -> None:
    """As torch's own mean of so many elements does, with most of these seeds."""
    threads, found = torch.get_num_threads(), []
    moments = [torch.randn(shape, generator=torch.Generator().manual_seed(s)).pow(4) for s in range(6)]
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append([HeldMoment(moment.clone(), 30.0, 30.0, EPS, True) for moment in moments])
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.floor, other.floor)
        assert one.divisor is not None and other.divisor is not None and torch.equal(one.divisor, other.divisor)
        mean = one.moment.mean(dim=tuple(range(1, len(shape))), keepdim=True) if len(shape) > 1 else one.moment.mean()
        torch.testing.assert_close(one.floor, mean * 0.1**2)
        assert float(one.divisor.square().mean()) == pytest.approx(1.0, rel=1e-2)


def test_a_moment_of_no_elements_has_a_floor() -> None:
    for shape in ((0,), (0, 5), (5, 0)):
        moment = HeldMoment(torch.empty(shape), 30.0, 30.0, EPS, True)
        assert moment.divisor is not None and moment.squares().shape == shape and not moment.divisor.numel()


def test_kernels_run_where_the_moment_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's current GPU may be another one."""
    entered: list[Tensor] = []

    def noted(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
        entered.append(tensor)
        return contextlib.nullcontext()

    monkeypatch.setattr(second_moment, "on_its_device", noted)
    moment = HeldMoment(torch.ones(3, 5), 30.0, 30.0, EPS, True)
    assert entered[0] is moment.moment and len(entered) == 3
