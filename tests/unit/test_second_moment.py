"""Adam's second moment, held: how it moves, and torch's own step with it, against Adam's formula in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from horovod_compress.engine.optimizer import saved_moments, second_moment
from horovod_compress.engine.optimizer.second_moment import BOUND, FLOOR, Moment
from horovod_compress.engine.optimizer.update_moment import LEFT, SharedSecondMoment
from horovod_compress.errors import ConfigError, StateError

RATE, BETA1, BETA2, EPS = 0.1, 0.9, 0.99, 1e-3
SHAPE = (5, 4, 6)


def tensor(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of several sizes, in one row much smaller than in the others."""
    found = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    found[1] *= 1e-3
    return found.to(dtype)


class Ours:
    """One parameter, with an optimizer whose second moment is held from the second step on."""

    def __init__(self, kind: Any = torch.optim.Adam, **options: Any) -> None:
        self.p = nn.Parameter(tensor(0))
        self.adam = kind([self.p], **{"lr": RATE, "betas": (BETA1, BETA2), "eps": EPS} | options)
        self.held = SharedSecondMoment(self.adam, {"p": self.p})
        self.p.grad = tensor(1)
        self.adam.step()
        self.held.begin(1)

    def step(self, grad: Tensor) -> None:
        self.p.grad = grad.clone()
        self.held.prepare()
        self.adam.step()

    def moment(self) -> Tensor:
        return self.held._moments["p"].moment.double()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"fused": True}, {"maximize": True}, {"foreach": True, "maximize": True}]
)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_is_torch_s_own_but_divides_by_what_is_held(kind: Any, options: dict[str, Any], decay: float) -> None:
    ours = Ours(kind, weight_decay=decay, **options)
    held, m, p = ours.moment(), ours.adam.state[ours.p]["exp_avg"].double(), ours.p.detach().double()
    decided = 0
    for number in range(2, 8):
        grad = tensor(number)
        ours.step(grad)
        g = -grad.double() if options.get("maximize") else grad.double()
        g = g + decay * p if kind is torch.optim.Adam else g
        p = p * (1 - RATE * decay) if kind is torch.optim.AdamW else p
        m = BETA1 * m + (1 - BETA1) * g
        mean = m / (1 - BETA1**number)
        root = torch.maximum(held, FLOOR**2 * held.mean((1, 2), keepdim=True)).sqrt()
        least = torch.maximum(mean.abs() / BOUND, g.abs() * (LEFT * (1 - BETA2) / (1 - BETA2**number)) ** 0.5)
        decided += int((root > least).sum())
        p = p - RATE * mean / (torch.maximum(root, least) + EPS)
        assert torch.allclose(ours.p.double(), p, rtol=1e-4, atol=1e-5)
        p = ours.p.detach().double()
    assert torch.equal(ours.moment(), held)
    assert decided > 300  # the control: what is held decides in most places


def test_groups_keep_their_own_rates() -> None:
    """Two groups move as two optimizers with these options do."""
    options = [{"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1}, {"lr": 0.01, "maximize": True}]
    alone = []
    for mine in options:
        ours = Ours(**mine)
        ours.step(tensor(2))
        alone.append(ours.p.detach())
    parameters = [nn.Parameter(tensor(0)) for _ in options]
    adam = torch.optim.Adam(
        [{"params": [p]} | {"lr": RATE, "betas": (BETA1, BETA2)} | o for p, o in zip(parameters, options, strict=True)],
        eps=EPS,
    )
    held = SharedSecondMoment(adam, dict(zip("ab", parameters, strict=True)))
    for number in (1, 2):
        for p in parameters:
            p.grad = tensor(number)
        if number == 2:
            held.begin(1)
            held.prepare()
        adam.step()
    assert all(torch.equal(*both) for both in zip(alone, parameters, strict=True))


@pytest.mark.parametrize("size", [1e-20, 1e-6, 1.0, 1e6])
def test_no_element_moves_by_more_than_ten_rates(size: float) -> None:
    """Whatever it is that comes, and as large as it may be, to elements that had hardly a gradient before."""
    p = nn.Parameter(torch.zeros(60))
    adam = torch.optim.Adam([p], lr=RATE)
    held = SharedSecondMoment(adam, {"p": p})
    p.grad = torch.cat([torch.zeros(30), torch.full((30,), 1e-6)])
    adam.step()
    held.begin(1)
    for step in range(60):
        before = p.detach().clone()
        p.grad = size * torch.linspace(0.1, 1, 60) * (step >= 20)
        held.prepare()
        adam.step()
        moved = (p.detach() - before).abs().max()
        assert float(moved) <= BOUND * RATE * 1.001, step
    assert float(moved) > RATE / 2 or size < 1e-12  # the control: it does move; beside eps these are nothing


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_is_taken_off_beforehand_leaves_no_negative_square(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Gradients of all sizes, many times what is held, whose first moments cancel: differences of close numbers."""
    sizes = torch.logspace(-24, 18, 400)
    p = nn.Parameter(torch.zeros(400, dtype=dtype))
    adam = torch.optim.Adam([p], lr=RATE, **options)
    held = SharedSecondMoment(adam, {"p": p})
    p.grad = (1e-5 * sizes).to(dtype)
    adam.step()
    held.begin(1)
    below = 0
    for step in range(40):
        factor = -9.0 if step % 8 == 7 else 1.0 if step % 8 == 6 else 0.0
        p.grad = (sizes * factor * torch.linspace(0.5, 1, 400)).to(dtype)
        held.prepare()
        below += int((adam.state[p]["exp_avg_sq"] < 0).sum())
        adam.step()
        after = adam.state[p]["exp_avg_sq"]
        assert bool(((after >= 0) & after.isfinite()).all()) and bool(p.isfinite().all()), step
    assert (below > 0) is (dtype.itemsize > 2)  # the control: it was taken off


def test_moved_by_every_gradient_it_is_adam_s_own() -> None:
    """The law of a rebuilding, with n = 1; both begin after the first step."""
    ours = Ours()
    stock = torch.optim.Adam([nn.Parameter(tensor(0))], lr=RATE, betas=(BETA1, BETA2))
    (p,) = stock.param_groups[0]["params"]
    for number in range(1, 9):
        p.grad = tensor(number)
        stock.step()
        if number > 1:
            ours.p.grad = tensor(number)
            ours.held.rebuild(number)
        expected = stock.state[p]["exp_avg_sq"].double() / (1 - BETA2**number)
        assert torch.allclose(ours.moment(), expected, rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_moving_forgets_by_the_steps_since_the_last_time(steps: int) -> None:
    moment, square = Moment(tensor(1).square(), 3.0), tensor(2).double().square()
    before = moment.moment.double()
    moment.move(tensor(2), BETA2, steps)
    weight = BETA2**steps * (1 - BETA2**3) / (1 - BETA2 ** (3 + steps))
    assert moment.steps == 3 + steps
    assert torch.allclose(moment.moment.double(), weight * before + (1 - weight) * square, rtol=1e-5)


def test_the_first_gradient_of_a_parameter_makes_all_of_it() -> None:
    """One that comes long after the start: nothing is held of it yet, and its first step is Adam's own."""
    ours = Ours()
    late = nn.Parameter(tensor(0))
    ours.adam.add_param_group({"params": [late]})
    held = SharedSecondMoment(ours.adam, {"p": ours.p, "late": late})
    held.begin(1)
    late.grad = tensor(3)
    held.prepare()
    ours.adam.step()
    stock = torch.optim.Adam([alone := nn.Parameter(tensor(0))], lr=RATE, betas=(BETA1, BETA2), eps=EPS)
    alone.grad = tensor(3)
    stock.step()
    assert torch.equal(late, alone) and "late" not in held._moments
    held.rebuild(500)
    assert torch.allclose(held._moments["late"].moment, tensor(3).square()) and held._moments["late"].steps == 499


def test_only_what_has_a_gradient_moves() -> None:
    ours = Ours()
    before, state = ours.moment(), {name: value.clone() for name, value in ours.adam.state[ours.p].items()}
    ours.p.grad = None
    ours.held.rebuild(5)
    ours.held.prepare()
    assert torch.equal(ours.moment(), before)
    assert all(torch.equal(value, ours.adam.state[ours.p][name]) for name, value in state.items())
    ours.p.grad = tensor(6)
    ours.held.rebuild(8)
    assert ours.held._moments["p"].steps == 1 + 3  # steps without a gradient do not count, as in Adam


def test_the_optimizer_s_state_stays_one_of_torch_s() -> None:
    """Torch alone goes on with it: the second moment is what it divided by last."""
    ours = Ours()
    for number in range(2, 6):
        ours.step(tensor(number))
    state = ours.adam.state[ours.p]
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and float(state["step"]) == 5
    divided = state["exp_avg_sq"].double() / (1 - BETA2**5)
    assert bool((divided >= ours.moment() * (1 - 1e-5)).all()) and bool(divided.isfinite().all())
    again = nn.Parameter(ours.p.detach().clone())
    stock = torch.optim.Adam([again])
    stock.load_state_dict(ours.adam.state_dict())
    again.grad = tensor(6)
    stock.step()
    assert float((again - ours.p).detach().abs().max()) <= BOUND * RATE


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_groups_of_earlier_torch_versions(kind: Any) -> None:
    """Before 2.7 groups did not say whether weight decay is decoupled: the class does."""
    found = []
    for old in (False, True):
        p = nn.Parameter(tensor(0))
        adam = kind([p], weight_decay=0.1)
        p.grad = tensor(1)
        if old:
            del adam.param_groups[0]["decoupled_weight_decay"]
        found.append(second_moment.ADAM.gradient(adam, adam.param_groups[0], p))
    assert torch.equal(*found) and torch.equal(found[0], tensor(1)) is (kind is torch.optim.AdamW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_held_has_at_least_32_bits(dtype: torch.dtype) -> None:
    p = nn.Parameter(tensor(0, dtype).transpose(0, 2))
    adam = torch.optim.AdamW([p], lr=RATE)
    held = SharedSecondMoment(adam, {"p": p})
    for number in range(1, 4):
        p.grad = tensor(number, dtype).transpose(0, 2)
        if number == 2:
            held.begin(1)
            held.prepare()
        adam.step()
    held.rebuild(3)
    moment = held._moments["p"].moment
    assert moment.dtype is torch.promote_types(dtype, torch.float32) and moment.is_contiguous()
    assert bool(p.isfinite().all())


@pytest.mark.parametrize("shape", [(), (0,), (0, 7), (7, 0), (1,)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    moment = Moment(torch.zeros(shape), 0.0)
    moment.move(torch.full(shape, 2.0), BETA2, 5)
    assert moment.squares().shape == shape and bool(torch.isclose(moment.squares(), torch.tensor(4.0)).all())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"second_moment": "local"}, 'should be "auto", "shared" or "own", got \'local\''),
        ({"warmup_steps": 0}, "warmup_steps should be a whole number, at least 1, got 0"),
        ({"rebuild_every": 2.0}, "rebuild_every should be a whole number, at least 1, got 2.0"),
        ({"communication_delay": True}, "communication_delay should be a whole number, at least 1, got True"),
    ],
)
def test_options_without_a_meaning_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        second_moment.check_options(**{"second_moment": "auto"} | given)


@pytest.mark.parametrize("value", [math.nan, -math.inf, -1.0])
def test_a_saved_second_moment_that_is_none_is_refused(value: float) -> None:
    ours = Ours()
    saved = ours.held.state_dict()
    saved["moments"]["p"]["moment"][0, 0, 0] = math.inf  # of a square that has overflowed, as Adam's own may have
    ours.held.check(saved, warming=False)
    saved["moments"]["p"]["moment"][0, 0, 0] = value
    with pytest.raises(ConfigError, match=rf"saved second moment of p should be at least 0, got {value}; load a state"):
        ours.held.check(saved, warming=False)


def test_a_saved_second_moment_that_lacks_something_is_refused_before_anything_is_loaded() -> None:
    ours = Ours()
    saved = ours.held.state_dict()
    del saved["moments"]["p"]["steps"]
    with pytest.raises(StateError, match=r"saved second moment of 'p' should be .* with its steps, got"):
        ours.held.check(saved, warming=False)
    whole = {"moment": torch.ones(2), "steps": 3.0, "since": 3.0, "eps": 1e-8, "divides": True}
    needs, shapes = [name for name in whole if name != "moment"], {"w": torch.Size([2])}
    saved_moments.check_state({"w": whole}, shapes, needs)
    for name in whole:
        with pytest.raises(StateError, match=r"second moment of 'w' should be .* steps, since, eps, divides, got"):
            saved_moments.check_state({"w": {n: part for n, part in whole.items() if n != name}}, shapes, needs)


def test_a_saved_second_moment_of_another_model_is_told_by_what_differs() -> None:
    moment = {"moment": torch.ones(2), "steps": 3.0}
    saved_moments.check_state({"w": moment}, {"w": torch.Size([2])}, ["steps"])
    with pytest.raises(StateError, match=r"of w should be of shape \(3,\), got \(2,\); load the state of the same"):
        saved_moments.check_state({"w": moment}, {"w": torch.Size([3])}, ["steps"])
    with pytest.raises(StateError, match=r"second moment of w, and no such parameter; load the state of the same"):
        saved_moments.check_state({"w": moment}, {"v": torch.Size([2])}, ["steps"])


def test_no_warm_up_begins_again() -> None:
    ours = Ours()
    with pytest.raises(ConfigError, match="finished its warm-up within 1 local steps"):
        ours.held.check(ours.held.state_dict(), warming=True)


@pytest.mark.parametrize(
    ("beta2", "steps", "counts"),
    [(0.999, 50, 50), (0.999, 1000, 105), (0.99, 50, 10), (0.95, 50, 2), (0.8, 50, 1), (0.5, 0.0, 0.0), (1.0, 50, 50)],
)
def test_an_exact_gradient_counts_for_no_more_steps_than_let_the_second_moment_forget_a_tenth(
    beta2: float, steps: float, counts: float
) -> None:
    """But for one at least; Adagrad's, with a beta of 1, forgets nothing."""
    assert second_moment.counted(beta2, steps) == counts
