"""Every optimizer whose second moment is held: its own trajectory with exact gradients, else a step that divides by V.

Each is compared with its formula, written here in float64 for one tensor; real optimizers do the steps.
"""

from __future__ import annotations

import gc
import importlib
import logging
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from horovod_compress.engine.optimizer import family, step_hooks
from horovod_compress.engine.optimizer.second_moment import BOUND, FLOOR, Moment
from horovod_compress.engine.optimizer.taker import Taker, Takers
from horovod_compress.errors import ConfigError

RATE, EPS, SHAPE = 0.01, 1e-6, (5, 4, 6)
#: Steps that the optimizer does alone, before its second moment is held: RAdam divides from its sixth on.
ALONE = 8


def tensor(seed: int) -> Tensor:
    """Return numbers of several sizes, in one row much smaller than in the others, and almost 0 in places."""
    found = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    found[1] *= 1e-2
    found[:, 2, 3] *= 1e-3
    return found


def optimizer_of(package: str, name: str, options: dict[str, Any]) -> tuple[Any, nn.Parameter]:
    """Return an optimizer of one parameter; skip where its package is missing."""
    module = torch.optim if package == "torch" else pytest.importorskip(package)
    parameter = nn.Parameter(tensor(0))
    optimizer = getattr(module, name)([parameter], **{"lr": RATE, "eps": EPS} | options)
    if package == "schedulefree":
        optimizer.train()
    return optimizer, parameter


def step(optimizer: Any, parameter: nn.Parameter, grad: Tensor) -> None:
    parameter.grad = grad.clone()
    optimizer.step()


def begun(package: str, name: str, options: dict[str, Any]) -> tuple[Any, nn.Parameter, Moment]:
    """Return an optimizer that has done some steps, and the second moment that is held from then on."""
    optimizer, parameter = optimizer_of(package, name, options)
    for number in range(ALONE):
        step(optimizer, parameter, tensor(1 + number))
    form, group = family.form_of(optimizer), optimizer.param_groups[0]
    assert family.may_share(optimizer, "auto")
    assert form.steps(group, optimizer.state[parameter]) == ALONE
    return optimizer, parameter, Moment(*form.taken_over(group, optimizer.state[parameter]))


def write(optimizer: Any, parameter: nn.Parameter, held: Moment, grad: Tensor, *, exact: bool) -> None:
    """Do what is done before the optimizer's own step, with an exact gradient or another."""
    parameter.grad = grad.clone()
    form, group, state = family.form_of(optimizer), optimizer.param_groups[0], optimizer.state[parameter]
    with torch.no_grad():
        seen = form.gradient(optimizer, group, parameter)
        if exact:
            form.move(held, group, seen, 1)
        form.write(group, state, seen, held, form.steps(group, state) + 1, exact=exact)


EVERY = [
    *(("torch", name, {}) for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad")),
    ("torch", "NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("torch", "RAdam", {"weight_decay": 0.1, "foreach": True}),
    ("torch", "Adamax", {"weight_decay": 0.1, "maximize": True, "foreach": True}),
    ("torch", "RMSprop", {"weight_decay": 0.1, "momentum": 0.9, "alpha": 0.9}),
    ("torch", "Adagrad", {"weight_decay": 0.1, "lr_decay": 0.1, "foreach": True, "initial_accumulator_value": 0.1}),
    ("schedulefree", "AdamWScheduleFree", {"weight_decay": 0.1, "warmup_steps": 4}),
    ("schedulefree", "AdamWScheduleFree", {"foreach": False}),
    ("schedulefree", "RAdamScheduleFree", {"weight_decay": 0.1}),
]


@pytest.mark.parametrize(("package", "name", "options"), EVERY, ids=str)
def test_with_exact_gradients_in_every_step_it_is_the_optimizer_s_own_trajectory(
    package: str, name: str, options: dict[str, Any]
) -> None:
    ours, p, held = begun(package, name, options)
    stock, q, _ = begun(package, name, options)
    assert torch.equal(p, q)
    for number in range(100, 130):
        grad = tensor(number) * (1 + number % 7)
        write(ours, p, held, grad, exact=True)
        ours.step()
        before = q.detach().clone()
        step(stock, q, grad)
        moved = float((q.detach() - before).abs().max())
        assert float((p - q).detach().abs().max()) < 1e-3 * moved, number
        with torch.no_grad():
            p.copy_(q)  # else rounding adds up


def adam(d: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], number: int) -> Tensor:
    beta1 = group["betas"][0]
    m = state["exp_avg"].double().lerp(g, 1 - beta1)
    return m / (1 - beta1**number) / (d + EPS)


def nadam(d: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], number: int) -> Tensor:
    beta1, decay = group["betas"][0], group["momentum_decay"]
    now, coming = (beta1 * (1 - 0.5 * 0.96 ** (n * decay)) for n in (number, number + 1))
    product = float(state["mu_product"]) * now
    m = state["exp_avg"].double().lerp(g, 1 - beta1)
    return ((1 - now) / (1 - product) * g + coming / (1 - product * coming) * m) / (d + EPS)


def radam(d: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], number: int) -> Tensor:
    beta1, beta2 = group["betas"]
    longest = 2 / (1 - beta2) - 1
    rho = longest - 2 * number * beta2**number / (1 - beta2**number)
    assert rho > 5
    rectified = ((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho)) ** 0.5
    m = state["exp_avg"].double().lerp(g, 1 - beta1) / (1 - beta1**number)
    return m * rectified / (d + EPS / (1 - beta2**number) ** 0.5)


def adamax(d: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], number: int) -> Tensor:
    m = state["exp_avg"].double().lerp(g, 1 - group["betas"][0])
    return m / (1 - group["betas"][0] ** number) / torch.maximum(d, g.abs() + EPS)


def rmsprop(d: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], number: int) -> Tensor:
    return g / (d * (1 - group["alpha"] ** number) ** 0.5 + EPS)


def adagrad(d: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], number: int) -> Tensor:
    return g / (torch.maximum(d, g.abs()) + EPS)


def schedule_free(d: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any], number: int) -> Tensor:
    """With a constant rate the average takes in 1/n of z, before the step."""
    weights = state["weights"].double()
    y = torch.lerp(weights, state["z"].double(), 1 / number)
    return (weights - y) / RATE - (group["betas"][0] * (1 - 1 / number) - 1) * g / (d + EPS)


CODED: list[tuple[str, str, Callable[..., Tensor]]] = [
    ("torch", "Adam", adam),
    ("torch", "AdamW", adam),
    ("torch", "NAdam", nadam),
    ("torch", "RAdam", radam),
    ("torch", "Adamax", adamax),
    ("torch", "RMSprop", rmsprop),
    ("torch", "Adagrad", adagrad),
    ("schedulefree", "AdamWScheduleFree", schedule_free),
]


@pytest.mark.parametrize(("package", "name", "formula"), CODED, ids=lambda value: getattr(value, "__name__", value))
def test_other_steps_divide_by_what_is_held(package: str, name: str, formula: Callable[..., Tensor]) -> None:
    """Whatever such gradients are, they leave V alone; of 0.3 of V's size, none reaches a bound."""
    plain = {"weight_decay": 0.0} if name == "AdamW" else {}
    optimizer, p, held = begun(package, name, plain)
    floor = FLOOR**2 * held.moment.double().mean((1, 2), keepdim=True)
    v = held.moment.double()
    root = torch.maximum(v, floor).sqrt()
    assert int((v < floor).sum()) > 0  # the control: the floor decides somewhere
    for number in range(100, 104):
        grad = 0.3 * tensor(number).sign() * root.float()
        write(optimizer, p, held, grad, exact=False)
        state = {key: value.clone() for key, value in optimizer.state[p].items()} | {"weights": p.detach().clone()}
        wanted = formula(root, grad.double(), state, optimizer.param_groups[0], ALONE + 1 + number - 100)
        optimizer.step()
        moved = (state["weights"] - p.detach()).double() / RATE
        assert torch.allclose(moved, wanted, rtol=2e-3, atol=2e-3), number
        assert torch.equal(held.moment.double(), v)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in ("NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad")] + [("RMSprop", {"alpha": 0.999})],
    ids=str,
)
def test_no_element_moves_by_much_more_than_ten_rates(name: str, options: dict[str, Any], size: float) -> None:
    """Of elements that had hardly a gradient before. NAdam's step has two parts, each of which is bounded."""
    parameter = nn.Parameter(torch.zeros(60))
    optimizer = getattr(torch.optim, name)([parameter], lr=RATE, **options)
    form, group, held, moved = family.form_of(optimizer), optimizer.param_groups[0], None, 0.0
    for number in range(60):
        before = parameter.detach().clone()
        if number < 10:
            parameter.grad = torch.cat([torch.full((30,), 1e-9), torch.full((30,), 1e-6)])
        else:
            parameter.grad = size * torch.linspace(0.1, 1, 60) * (number >= 20)
            state = optimizer.state[parameter]
            held = held or Moment(*form.taken_over(group, state))
            form.write(group, state, parameter.grad, held, number + 1)
        optimizer.step()
        moved = float((parameter.detach() - before).abs().max())
        assert moved <= (2 if name == "NAdam" else 1) * BOUND * RATE * 1.001 or number < 10, number
    assert moved > RATE / 100  # the control: it does move


class Renamed(torch.optim.RMSprop):
    pass


class Other(torch.optim.RMSprop):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Wrapped(torch.optim.NAdam):
    """What Horovod makes of an optimizer."""

    def _allreduce_grad_async(self) -> None: ...

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "options", "auto", "shared"),
    [
        (torch.optim.Adam, {}, True, True),
        (torch.optim.AdamW, {"maximize": True}, True, True),
        (torch.optim.RMSprop, {"momentum": 0.9}, True, True),
        (Wrapped, {}, True, True),
        (Renamed, {}, True, True),
        (Other, {}, False, True),
        (torch.optim.Adam, {"amsgrad": True}, False, None),
        (torch.optim.RMSprop, {"centered": True}, False, None),
        (torch.optim.RMSprop, {"alpha": 0.0}, False, None),
        (torch.optim.Adadelta, {}, False, None),
        (torch.optim.Adafactor, {}, False, None),
        (torch.optim.SGD, {}, False, None),
    ],
)
def test_whose_second_moment_may_be_shared(kind: Any, options: dict[str, Any], auto: bool, shared: bool | None) -> None:
    optimizer = kind([nn.Parameter(torch.zeros(3))], **options)
    assert not family.may_share(optimizer, "own")
    assert family.may_share(optimizer, "auto") is auto
    if shared is None:
        with pytest.raises(ConfigError, match="without amsgrad"):
            family.may_share(optimizer, "shared")
    else:
        assert family.may_share(optimizer, "shared") is shared


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RMSprop])
def test_update_mode_shares_that_of_adam_and_adamw_only(kind: Any) -> None:
    assert family.may_share(torch.optim.AdamW([nn.Parameter(torch.zeros(3))]), "shared", updates=True)
    optimizer = kind([nn.Parameter(torch.zeros(3))])
    assert not family.may_share(optimizer, "auto", updates=True)
    with pytest.raises(ConfigError, match="is for Adam and AdamW, with"):
        family.may_share(optimizer, "shared", updates=True)


class Foreign(torch.optim.Optimizer):
    """Adam of nobody's package, under other names."""

    def __init__(self, parameters: Any, names: tuple[str, ...] = ("m", "second_of_two"), **options: Any) -> None:
        super().__init__(parameters, options)
        self.names = names

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            for name in self.names:
                self.state[parameter].setdefault(name, torch.zeros_like(parameter)).addcmul_(
                    parameter.grad, parameter.grad
                )


BETAS = {"betas": (0.9, 0.999)}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (torch.optim.Adadelta, "Adadelta computes its second moment (square_avg)"),
        (torch.optim.Adafactor, "Adafactor computes its second moment (variance)"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "Adam computes its second moment (exp_avg_sq)"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "schedulefree's AdamW and RAdam, without amsgrad: choose"),
        (lambda p: torch.optim.RMSprop(p, centered=True), "RMSprop computes its second moment (square_avg)"),
        (Other, '"shared" holds it, if step() uses its state as that of RMSprop does'),
        (lambda p: Foreign(p, **BETAS, eps=1e-8), "Foreign computes its second moment (second_of_two)"),
        (lambda p: Foreign(p, ("m", "n"), **BETAS, eps=1e-8), "Foreign computes its second moment (n)"),
        (lambda p: Foreign(p, ("m", "n"), **BETAS), None),
        (lambda p: Foreign(p, ("exp_avg",), **BETAS, eps=1e-8), None),  # as Lion
        (lambda p: torch.optim.SGD(p, momentum=0.9), None),
        (torch.optim.Rprop, None),
        (torch.optim.ASGD, None),
    ],
)
def test_others_that_keep_squares_are_named_once(make: Any, told: str | None, caplog: Any) -> None:
    parameter = nn.Parameter(torch.ones(30))
    optimizer = make([parameter])
    for tells in (False, True):  # an elastic job meets it again after a reset, where this may be the rank that tells
        family.look_for_squares(optimizer, tells=tells)
    with caplog.at_level(logging.WARNING, "horovod_compress"):
        for number in range(3):
            step(optimizer, parameter, torch.randn(30, generator=torch.Generator().manual_seed(number)))
        family.look_for_squares(optimizer, tells=True)
        step(optimizer, parameter, torch.ones(30))
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (told is not None) and all(str(told) in text for text in texts)


@pytest.mark.parametrize(
    ("package", "name", "keeps"),
    [
        ("pytorch_optimizer", "Lamb", True),
        ("pytorch_optimizer", "Prodigy", True),
        ("pytorch_optimizer", "CAME", True),
        ("pytorch_optimizer", "FAdam", True),
        ("pytorch_optimizer", "AdaBelief", True),
        ("pytorch_optimizer", "Lion", False),
        ("pytorch_optimizer", "Tiger", False),
        ("schedulefree", "SGDScheduleFree", False),
    ],
)
def test_what_the_state_of_other_packages_shows(package: str, name: str, keeps: bool) -> None:
    pytest.importorskip(package)
    parameter = nn.Parameter(tensor(0)[0])
    optimizer = getattr(importlib.import_module(package), name)([parameter], lr=1e-3)
    if hasattr(optimizer, "train"):
        optimizer.train()
    step(optimizer, parameter, tensor(1)[0])
    assert (family.squares_in(optimizer) is not None) is keeps
    assert not family.may_share(optimizer, "auto")


def test_hooks_of_others_are_called_beside_the_look_at_the_state() -> None:
    """Torch walks over an optimizer's hooks while it calls them: none may leave then."""
    parameter, called = nn.Parameter(torch.ones(3, 3)), []
    optimizer = torch.optim.Adafactor([parameter])
    family.look_for_squares(optimizer, tells=True)
    optimizer.register_step_post_hook(lambda *given: called.append(1))
    for _ in range(2):
        parameter.grad = torch.ones(3, 3)
        optimizer.step()
    assert len(called) == 2


def test_the_look_at_the_state_keeps_no_optimizer_alive() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    family.look_for_squares(optimizer, tells=True)
    gone = weakref.ref(optimizer)
    gc.disable()  # which would end a cycle
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


# ---- steps that are none of the program's ----


@pytest.mark.parametrize(
    "builder", ["hvd.broadcast_optimizer_state()", "get_optimizer_state_dict()", "a function of the program's", None]
)
def test_a_step_that_only_builds_state_uses_no_exchange(builder: str | None) -> None:
    """Horovod and torch make it; the control is a step of the program's."""
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    seen: list[str] = []
    step_hooks.prepare_last(optimizer, lambda: seen.append("prepared"))
    takers = Takers()
    takers.know([Taker(optimizer)], lambda: seen.append("noted"))

    def broadcast_optimizer_state() -> None:
        parameter.grad = torch.zeros(3)
        optimizer.step()

    if builder == "hvd.broadcast_optimizer_state()":
        of_horovod = {**globals(), "__name__": "horovod.torch.functions"}
        made = broadcast_optimizer_state
        FunctionType(made.__code__, of_horovod, made.__name__, None, made.__closure__)()
    elif builder == "a function of the program's":
        broadcast_optimizer_state()
        builder = None
    elif builder:
        get_optimizer_state_dict(nn.ParameterList([parameter]), optimizer)
    else:
        parameter.grad = torch.zeros(3)
        optimizer.step()
    assert optimizer.state[parameter]
    assert seen == ([] if builder else ["prepared", "noted"])
