"""LANS against its formula."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import horovod_compress.ddp as hvc
from horovod_compress.errors import ConfigError

OPTIONS: dict[str, Any] = {"lr": 0.03, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}


def grads(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 5), (7,))]


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(grad) for grad in grads(100)]


def formula(steps: int) -> list[np.ndarray]:
    """Return the weights by the paper's algorithm 2, one tensor after the other."""
    lr, (beta1, beta2), eps, decay = OPTIONS.values()
    ends = []
    for index, start in enumerate(grads(100)):
        x, m, v = start.numpy().copy(), 0.0, 0.0
        for t in range(1, steps + 1):
            g = grads(t)[index].numpy()
            n = g / np.linalg.norm(g)
            m, v = beta1 * m + (1 - beta1) * n, beta2 * v + (1 - beta2) * n * n
            root = np.sqrt(v / (1 - beta2**t)) + eps
            r, c = m / (1 - beta1**t) / root + decay * x, n / root + decay * x
            x -= lr * np.linalg.norm(x) * (beta1 * r / np.linalg.norm(r) + (1 - beta1) * c / np.linalg.norm(c))
        ends.append(x)
    return ends


def stepped(optimizer: Any, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, grad in zip(parameters, grads(step), strict=True):
            parameter.grad = grad
        optimizer.step()


def test_lans_is_its_formula() -> None:
    parameters = weights()
    stepped(hvc.optim.LANS(parameters, **OPTIONS), parameters, range(1, 8))
    for mine, expected in zip(parameters, formula(7), strict=True):
        np.testing.assert_allclose(mine.detach().numpy(), expected, rtol=1e-12)
    assert not np.allclose(formula(7)[0], formula(6)[0])  # the control


def test_a_saved_state_goes_on_with_the_same_bits() -> None:
    whole, again = weights(), weights()
    stepped(optimizer := hvc.optim.LANS(again, **OPTIONS), again, range(1, 4))
    state = copy.deepcopy(optimizer.state_dict())
    stepped(hvc.optim.LANS(whole, **OPTIONS), whole, range(1, 8))
    other = hvc.optim.LANS(again)
    other.load_state_dict(state)
    stepped(other, again, range(4, 8))
    assert all(torch.equal(*both) for both in zip(whole, again, strict=True))


def test_zeros_are_no_trouble() -> None:
    """Weights, gradients, or both; a parameter without a gradient stays."""
    zeros, ones, left = (nn.Parameter(torch.full((3,), value)) for value in (0.0, 1.0, 1.0))
    optimizer = hvc.optim.LANS([zeros, ones, left], weight_decay=0.0)
    zeros.grad, ones.grad = torch.zeros(3), torch.zeros(3)
    optimizer.step()
    assert torch.equal(zeros, torch.zeros(3)) and torch.equal(ones, torch.ones(3))
    zeros.grad = torch.ones(3)
    optimizer.step(lambda: None)
    assert bool((zeros < 0).all()) and bool(zeros.isfinite().all())
    assert torch.equal(left, torch.ones(3))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_norms_that_float16_cannot_hold_are_found(scale: float) -> None:
    """LANS takes out how large gradients are: scaled ones move weights as far."""
    start, grad = (torch.randn(10_000, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    ends = []
    for factor in (1.0, scale):
        optimizer = hvc.optim.LANS([weights := nn.Parameter(start.half())], lr=0.1)
        weights.grad = grad.half() * factor
        optimizer.step()
        ends.append(weights.detach())
    assert bool(weights.grad.isfinite().all()) and (float(weights.grad.float().norm()) > 65504) == (scale > 1)
    assert torch.allclose(ends[0], ends[1], atol=2e-3) and not torch.equal(ends[0], start.half())


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"eps": 0.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}], ids=str
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="should be"):
        hvc.optim.LANS([nn.Parameter(torch.ones(1))], **options)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="dense gradients only"):
        hvc.optim.LANS(table.parameters()).step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_single_number_moves(dtype: torch.dtype) -> None:
    number = nn.Parameter(torch.tensor(2.0, dtype=dtype))
    number.grad = torch.tensor(1.0, dtype=dtype)
    hvc.optim.LANS([number], lr=0.25, weight_decay=0.0).step()
    assert number.item() == 1.5
