"""Adam with a held second moment, against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from horovod_compress.engine.optimizer.adam import SharedSecondMoment
from horovod_compress.errors import ConfigError


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(0)))


def gradients(number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(50, generator=generator) for _ in range(number)]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_step_is_that_of_adam_but_for_the_held_second_moment(kind: type, decay: float) -> None:
    """After one step of torch's, further ones by the formula, in float64."""
    lr, beta1, beta2, eps = 0.1, 0.9, 0.9999, 1e-3  # Adam's bound is 10 then
    mine = parameter()
    adam = kind([mine], lr=lr, betas=(beta1, beta2), weight_decay=decay, eps=eps)
    first, *others = gradients(4)
    mine.grad = first.clone()
    adam.step()
    p, state = mine.detach().double(), adam.state[mine]
    m, v = state["exp_avg"].double(), state["exp_avg_sq"].double()
    held = SharedSecondMoment(adam)
    held.take_over()
    for number, grad in enumerate(others, start=2):
        with torch.no_grad():
            mine.grad = grad.clone()
            held.step()
        g = grad.double() + (decay * p if kind is torch.optim.Adam else 0)
        p = p * (1 - lr * decay) if kind is torch.optim.AdamW else p
        m = beta1 * m + (1 - beta1) * g
        p = p - lr * ((m / (1 - beta1**number)) / ((v / (1 - beta2)).sqrt() + eps)).clamp(-10, 10)
    assert torch.allclose(mine.double(), p, rtol=1e-5, atol=1e-5)
    assert torch.equal(state["exp_avg_sq"].double(), v)
    assert (mine - parameter()).abs().max() > 0.1  # the control: it moved


def test_rebuilding_moves_the_second_moment_only() -> None:
    p = parameter()
    adam = torch.optim.Adam([p], lr=0.1, betas=(0.9, 0.5))
    held = SharedSecondMoment(adam)
    first, second = gradients(2)
    p.grad = first.clone()
    adam.step()
    held.take_over()
    weights, moment = p.detach().clone(), adam.state[p]["exp_avg"].clone()
    before = adam.state[p]["exp_avg_sq"].clone()
    with torch.no_grad():
        held.rebuild([(p, second.clone())], steps=3)
    assert torch.equal(p, weights) and torch.equal(adam.state[p]["exp_avg"], moment)
    assert torch.allclose(adam.state[p]["exp_avg_sq"], before * 0.5**3 + second.square() * (1 - 0.5**3))
    assert adam.state[p]["second_moment_steps"] == 4


def test_an_element_without_a_second_moment_moves_no_further_than_adam_would() -> None:
    p = parameter()
    adam = torch.optim.Adam([p], lr=0.1, betas=(0.9, 0.999))
    p.grad = torch.zeros(50)
    adam.step()
    held = SharedSecondMoment(adam)
    held.take_over()
    before = p.detach().clone()
    with torch.no_grad():
        p.grad = torch.linspace(-1, 1, 50)
        held.step()
    bound = 0.1 * 0.1 / 0.001**0.5
    assert torch.allclose((p - before).abs(), torch.full((50,), bound), rtol=1e-4)


def test_options_without_a_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match="amsgrad"):
        SharedSecondMoment(torch.optim.Adam([parameter()], amsgrad=True))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_groups_of_earlier_torch_versions(kind: type) -> None:
    """Before 2.7 groups did not say whether weight decay is decoupled: the class does."""
    found = []
    for old in (False, True):
        p = parameter()
        adam = kind([p], lr=0.1, weight_decay=0.1)
        if old:
            for group in adam.param_groups:
                del group["decoupled_weight_decay"]
        held, p.grad = SharedSecondMoment(adam), gradients(1)[0]
        with torch.no_grad():
            held.rebuild([(p, p.grad.clone())], steps=1)
            held.step()
        found.append(p.detach())
    assert torch.equal(*found)
