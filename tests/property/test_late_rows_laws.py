"""Rows whose gradient comes between two exact rounds: they move as Adam moves them, though V is 0 or small there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_compress.codecs.sparse_binary import SparseBinary
from horovod_compress.codecs.stc import Stc
from horovod_compress.engine.optimizer import family, rare_rows, saved_moments, second_moment
from horovod_compress.engine.optimizer.update_moment import SharedSecondMoment
from horovod_compress.errors import StateError
from tests.property.test_held_laws import RATE, Grads, Team, scaled_by, without
from tests.support.local import all_same, random_grads, spec
from tests.support.marks import slow

#: Rows with a step of their own.
TENSORS = [spec("words", 16, 64), spec("weight", 12, 40)]
#: Exact rounds are those before step 4, and then one in 30: this is long before the next one.
LATE, ROW = 8, 2


def grads(step: int, world: int = 2, *, least: float = 0.0) -> Grads:
    """Return gradients of which one row has none but once, on the last rank; or else one that is so small."""
    given = random_grads(world, TENSORS, seed=step)
    for rank, mine in enumerate(given):
        mine["words"] *= 0.01
        mine["words"][ROW] *= 1.0 if step == LATE and rank == world - 1 else least
    return given


def team(method: Any = "marsit", **more: Any) -> Team:
    return Team(method, **{"world": 2, "warmup": 4, "every": 30, "second_moment": "auto", "tensors": TENSORS} | more)


def distance(method: str, make: Any) -> float:
    """Return how far a row has moved long after its only gradient, in learning rates."""
    with team(method, make=make) as ranks:
        before = ranks.weights()["words"][ROW]
        for step in range(70):
            ranks.step(grads(step))
            if ranks.held[0] and LATE <= step < 30:
                assert not bool(ranks.moment("words").moment[ROW].any()), "V takes in exact gradients only"
        return float((ranks.weights()["words"][ROW] - before).abs().mean()) / RATE


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adamax, *slow(torch.optim.NAdam, torch.optim.RAdam)])
@pytest.mark.parametrize("method", ["marsit", "topk", "onebit_adam", *slow("ef_signsgd", "powersgd", "qsgd", "onebit")])
def test_a_row_that_begins_late_moves_hardly_farther_than_adam_moves_it(method: str, make: Any) -> None:
    moved, adam_s = distance(method, make), distance("none", make)
    assert 0.0 < moved < 2.5 * adam_s


@pytest.mark.parametrize("method", ["marsit", "topk", *slow("onebit_adam", "sparse_binary")])
@pytest.mark.parametrize("make", [torch.optim.AdamW, *slow(torch.optim.Adamax, torch.optim.RMSprop)])
@pytest.mark.parametrize("at", [93, 100])
def test_a_row_that_has_had_none_for_long_moves_hardly_farther_than_adam(method: str, make: Any, at: int) -> None:
    """V forgets it, in many exact rounds. It moved by 10 learning rates for as long as the first moment lasted."""
    fast = {"alpha": 0.9, "momentum": 0.9} if make is torch.optim.RMSprop else {"betas": (0.9, 0.9)}

    def moved(method: str) -> float:
        with team(method, make=make, warmup=90, every=90, **fast) as ranks:
            for step in range(160):
                if step == at:
                    before = ranks.weights()["words"][ROW]
                given = grads(step, least=float(step < 4))
                given[1]["words"][ROW] += given[1]["words"][ROW + 1] * float(step == at)
                ranks.step(given)
            return float((ranks.weights()["words"][ROW] - before).abs().mean()) / RATE

    assert 0.0 < moved(method) < 2.5 * moved("none")


@pytest.mark.parametrize("method", ["marsit", *slow("ef_signsgd", "qsgd")])
def test_a_row_that_is_small_in_all_steps_moves_as_adam_moves_it(method: str) -> None:
    def moved(method: str) -> float:
        with team(method) as ranks:
            before = ranks.weights()["words"][ROW]
            for step in range(60):
                ranks.step(grads(LATE + 1 + step, least=1e-2))
            return float((ranks.weights()["words"][ROW] - before).abs().mean()) / RATE

    assert 0.7 * moved("none") < moved(method)


@pytest.mark.parametrize("least", [0.0, 1e-3])
@pytest.mark.parametrize("at", [LATE, LATE + 1, LATE + 4, 34])
def test_resume_is_exact(at: int, least: float) -> None:
    with team() as ranks:
        for step in range(at):
            ranks.step(grads(step, least=least))
        saved = ranks.saved()
        begun = at > (4 if least else LATE)
        assert all(bool(moments["words"]["stand_in"].any()) is begun for _, _, moments, _ in saved)
        for step in range(at, 40):
            ranks.step(grads(step, least=least))
        whole = ranks.weights()
    for forget in (False, True):
        with team() as again:
            again.resume(saved, without("stand_in") if forget else dict)
            for step in range(at, 40):
                again.step(grads(step, least=least))
            assert all_same([whole, again.weights()]) is (not forget or not begun)


@pytest.mark.parametrize("make", [torch.optim.AdamW, *slow(torch.optim.Adamax, torch.optim.NAdam)])
def test_where_a_state_lacks_it_the_first_moment_stands_in(make: Any) -> None:
    """As in states of other shards. The row moved by 10 rates in each of many steps."""
    at = LATE + 10
    with team("topk", make=make) as ranks:
        for step in range(at):
            ranks.step(grads(step))
        saved = ranks.saved()
    moved = {}
    for forget in (False, True):
        with team("topk", make=make) as again:
            again.resume(saved, without("stand_in") if forget else dict)
            before = again.weights()["words"][ROW]
            for step in range(at, 60):
                again.step(grads(step))
            moved[forget] = float((again.weights()["words"][ROW] - before).abs().mean()) / RATE
    assert 0 < moved[False] < moved[True] < 11


@pytest.mark.parametrize("at", [LATE, LATE + 2])
def test_ranks_compare_what_stands_in(at: int) -> None:
    with team() as ranks:
        for step in range(at):
            ranks.step(grads(step))
        mine, other = ranks.held
        assert mine and other and mine.settings() == other.settings()
        saved = copy.deepcopy(other.state_dict())
        for state, equal in [(saved, True), (without("stand_in")(saved), at == LATE)]:
            other.load_state_dict(copy.deepcopy(state))
            other._prepared = mine._prepared
            assert (mine.settings() == other.settings()) is equal, "one rank has loaded it, if only what it had"


def test_a_gradient_scaler_changes_nothing() -> None:
    with team(make=torch.optim.Adam, fused=True) as plain:
        for step in range(20):
            plain.step(grads(step))
        with team(make=torch.optim.Adam, fused=True, scaled=scaled_by(1024.0)) as ranks:
            for step in range(20):
                ranks.step(grads(step))
            assert all_same([plain.weights(), ranks.weights()])


def test_a_late_gradient_that_is_not_finite_leaves_no_trace() -> None:
    with team() as ranks:
        for step in range(LATE):
            ranks.step(grads(step))
        held = ranks.moment("words")
        form, group = second_moment.ADAM, ranks.optimizers[0].param_groups[0]
        parameter = nn.Parameter(torch.zeros(16, 64))
        for value in (torch.nan, torch.inf, -torch.inf):
            parameter.grad = torch.zeros(16, 64)
            parameter.grad[ROW, 3] = value
            rare_rows.take_in(form, held, group, {}, parameter, float(LATE + 1), 1.0)
            assert held.stand_in is not None and not bool(held.stand_in.any())


def test_what_stands_in_is_adam_s_own_second_moment_of_the_largest_elements() -> None:
    group = {"betas": (0.9, 0.99), "eps": 1e-8}
    parameter, held = nn.Parameter(torch.zeros(3, 4, 2)), second_moment.Moment(torch.zeros(3, 4, 2), 6.0)
    held.moment[1] = 1.0
    held.derive()
    own, coming = torch.zeros(3, dtype=torch.float64), torch.Generator().manual_seed(1)
    for now in range(9, 20):
        parameter.grad = torch.randn(3, 4, 2, generator=coming) * float(now % 3 == 0)
        rare_rows.take_in(second_moment.ADAM, held, group, {}, parameter, now, 0.5)
        largest = (0.5 * parameter.grad.double()).abs().amax((1, 2)) * torch.tensor([1.0, 0.0, 1.0])
        own = 0.99 * own + 0.01 * largest.square()
        assert held.stand_in is not None and held.stand_in.shape == (3, 1, 1)
        assert torch.allclose(held.stand_in.view(-1).double(), own / (1 - 0.99**now), rtol=1e-5)
        assert torch.equal(held.least(exact=False)[1], held.floor[1])  # type: ignore[index]
    held.move(torch.ones(3, 4, 2), 0.99, 1.0)
    parameter.grad.fill_(1.0)
    before = held.stand_in.clone()
    rare_rows.take_in(second_moment.ADAM, held, group, {}, parameter, 20, 1.0)
    assert bool((held.stand_in[[0, 2]] < before[[0, 2]]).all()), "V has a gradient of all rows now"


@pytest.mark.parametrize(("now", "size"), [(1.0, 0.0), (9.0, 3.0)])
def test_it_begins_with_the_mean_that_the_first_moment_is(now: float, size: float) -> None:
    group, share = {"betas": (0.9, 0.99), "eps": 1e-8}, 1 - 0.9 ** (now - 1)
    parameter, held = nn.Parameter(torch.zeros(3, 4)), second_moment.Moment(torch.zeros(3, 4), 6.0)
    held.moment[1] = 1.0
    held.derive()
    parameter.grad, first = torch.zeros(3, 4), torch.zeros(3, 4)
    first[:, 2] = -size * share  # in all steps until now
    rare_rows.take_in(second_moment.ADAM, held, group, {"exp_avg": first}, parameter, now)
    assert held.stand_in is not None
    expected = size**2 * 0.99 * (1 - 0.99 ** (now - 1)) / (1 - 0.99**now)
    assert torch.allclose(held.stand_in.view(-1), torch.tensor([expected, 0.0, expected]))


def test_a_row_that_v_has_just_forgotten_begins_with_what_the_first_moment_has() -> None:
    """A gradient that came shortly before V moved; a load in between changes nothing."""
    group, state = {"betas": (0.9, 0.9), "eps": 1e-8}, {"exp_avg": torch.zeros(3, 4)}
    parameter, held = nn.Parameter(torch.zeros(3, 4)), second_moment.Moment(torch.ones(3, 4), 6.0)
    parameter.grad, given = torch.zeros(3, 4), torch.ones(3, 4)
    held.begin_stand_in()
    state["exp_avg"][1, 2], given[1] = -0.5, 0.0
    rare_rows.take_in(second_moment.ADAM, held, group, state, parameter, 9.0)
    assert held.least(exact=True) is None, "V has it still"
    held.move(given, 0.9, 90.0)
    rare_rows.take_in(second_moment.ADAM, held, group, state, parameter, 100.0)
    again = second_moment.Moment(**copy.deepcopy(held.state()))
    for now, expected in ((101.0, 0.9**2), (102.0, 0.9**3)):
        for one in (held, again):
            rare_rows.take_in(second_moment.ADAM, one, group, state, parameter, now)
            least = one.least(exact=True)
            assert least is not None
            assert torch.allclose(least.view(-1), torch.tensor([0.0, 0.25 * expected, 0.0]), rtol=1e-3)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.RMSprop])
def test_what_has_overflowed_spoils_no_row(make: Any) -> None:
    parameter, held = nn.Parameter(torch.zeros(2, 3)), second_moment.Moment(torch.zeros(2, 3), 6.0)
    (group,) = make([parameter], lr=RATE).param_groups
    form = family.form_of(make([parameter], lr=RATE))
    parameter.grad = torch.full((2, 3), 1e20)
    rare_rows.take_in(form, held, group, {}, parameter, 9.0)
    held.move(torch.ones(2, 3), 0.99, 1.0)
    for now in range(10, 3000):
        rare_rows.take_in(form, held, group, {}, parameter, float(now))
        assert held.stand_in is not None and bool(held.stand_in.isfinite().all())
    assert not bool(held.stand_in.any()), "it ends"
    held.derive()
    rare_rows.take_in(form, held, group, {}, parameter, 3000.0)
    assert held.surpassed is None and held.least(exact=True) is None


@pytest.mark.parametrize(("make", "size"), [(torch.optim.AdamW, 1e-4), (torch.optim.Adagrad, 2e-4)])
def test_it_stands_in_only_until_v_has_the_row(make: Any, size: float) -> None:
    """Small elements would be divided by the largest of their row for long, and in Adagrad for ever."""

    def small(method: str) -> float:
        with team(method, make=make) as ranks:
            for step in range(120):
                if step == 60:
                    before = ranks.weights()["words"][ROW, 4:]
                given = grads(step)
                for mine in given:
                    mine["words"][ROW] = size * float(step >= LATE)
                    mine["words"][ROW, :4] *= 50
                ranks.step(given)
            return float((ranks.weights()["words"][ROW, 4:] - before).abs().mean()) / RATE

    moved, own = small("marsit"), small("none")
    assert 0.2 * own < moved < 2.5 * own


@pytest.mark.parametrize("least", [0.0, 1e-3, 1e-6])
def test_what_is_sent_of_others_does_not_depend_on_a_new_row(least: float) -> None:
    """A row that has had next to no gradient was divided by as little, and set the one magnitude of what was sent."""
    for method in (Stc(density=0.3), SparseBinary(density=0.3)):
        with team(method) as ranks:
            sizes = []
            for step in range(LATE + 6):
                result = ranks.step(grads(step, least=least))[0]["words"]
                sizes.append(float(result[ROW + 1 :].norm()))
            assert max(sizes[LATE:]) < 3 * max(sizes[4:LATE])


@pytest.mark.parametrize("given", [torch.ones(2), torch.ones(2, 1).double(), -torch.ones(2, 1), [1.0, 1.0]])
def test_a_saved_part_that_does_not_fit_is_refused(given: Any) -> None:
    whole = {"moment": torch.ones(2, 3), "steps": 3.0, "since": 3.0, "eps": 1e-8, "divides": True}
    shapes, needs = {"w": torch.Size([2, 3])}, ("steps", "since", "eps", "divides")
    saved_moments.check_state({"w": whole | {"stand_in": torch.ones(2, 1)}}, shapes, needs)
    with pytest.raises(StateError, match="saved second moment of 'w' should be"):
        saved_moments.check_state({"w": whole | {"stand_in": given}}, shapes, needs)


# ---- update mode ----


def locally(steps: range, p: nn.Parameter, adam: Any, held: SharedSecondMoment) -> list[Tensor]:
    found = []
    for step in steps:
        p.grad = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
        p.grad[ROW] *= float(step == LATE)
        held.prepare()
        adam.step()
        found.append(p.detach().clone())
    return found


def test_some_steps_may_be_made_in_inference_mode() -> None:
    """What stands in from then on is made there, and has to take in what comes in other steps."""

    def weights(inferred: set[int]) -> Tensor:
        with team() as ranks:
            for step in range(40):
                results = ranks.exchange(grads(step))
                with torch.inference_mode(step in inferred):
                    ranks.use(results)
            return ranks.weights()["words"]

    assert torch.equal(weights({34, 35}), weights(set()))


def test_local_steps_move_such_a_row_as_adam_does_and_go_on_after_a_resume() -> None:
    """V is that of the ranks' mean gradient; what stands in is this rank's own."""
    p = nn.Parameter(torch.zeros(6, 8))
    adam = torch.optim.AdamW([p], lr=RATE, weight_decay=0.0)
    held = SharedSecondMoment(adam, {"p": p})
    locally(range(1), p, adam, held)
    held.begin(1)
    locally(range(1, 12), p, adam, held)
    saved, state, weights = held.state_dict(), copy.deepcopy(adam.state_dict()), p.detach().clone()
    held.check(saved, warming=False)
    whole = locally(range(12, 80), p, adam, held)
    assert 0 < float(p.detach()[ROW].abs().max()) < 11 * RATE  # 10 in Adam, of a gradient in step 9
    for forget in (False, True):
        q = nn.Parameter(weights.clone())
        other = torch.optim.AdamW([q], lr=RATE, weight_decay=0.0)
        other.load_state_dict(copy.deepcopy(state))
        again = SharedSecondMoment(other, {"p": q})
        kept = copy.deepcopy(saved)
        if forget:
            del kept["moments"]["p"]["stand_in"]
        again.load_state_dict(kept)
        assert torch.equal(torch.stack(locally(range(12, 80), q, other, again)), torch.stack(whole)) is not forget


@pytest.mark.parametrize("saves", [False, True])
def test_a_row_stands_in_where_v_has_moved_before_this_rank_had_a_state(saves: bool) -> None:
    """Its first step leaves a first moment; a row of which V has nothing moved by 10 rates a step after a resume."""
    p = nn.Parameter(torch.zeros(6, 8))
    adam = torch.optim.AdamW([p], lr=RATE, weight_decay=0.0)
    held = SharedSecondMoment(adam, {"p": p})
    held.begin(1)
    p.grad = torch.ones(6, 8)  # the mean over ranks, of which another had one
    p.grad[ROW] = 0.0
    held.rebuild(2)
    locally(range(LATE, LATE + 1), p, adam, held)
    if saves:
        saved, held = held.state_dict(), SharedSecondMoment(adam, {"p": p})
        held.load_state_dict(saved)
    locally(range(LATE + 1, LATE + 30), p, adam, held)
    assert 0 < float(p.detach()[ROW].abs().max()) < 11 * RATE
