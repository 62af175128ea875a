"""What programs do to gradients: views, others in their place, none; and what they multiply, sum or hook."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.front import DDP
from tests.support.rank import rank

from .run import At, Run, case, data, each_step, simple, small


@case
def usual(run: Run) -> nn.Module:
    return simple(small(), run)


@case
def zeroed_in_place(run: Run) -> nn.Module:
    return simple(small(), run, set_to_none=False)


@case
def views_of_one_buffer(run: Run) -> nn.Module:
    model = small()
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))

    def before(model: nn.Module, step: int) -> None:
        at = 0
        flat.zero_()
        for p in model.parameters():
            p.grad = flat[at : at + p.numel()].view_as(p)
            at += p.numel()

    return simple(model, run, before=before)


@case
def transposed_gradients(run: Run) -> nn.Module:
    def before(model: nn.Module, step: int) -> None:
        for p in model.parameters():
            if p.dim() == 2:
                p.grad = torch.zeros(p.shape[::-1]).t()

    return simple(small(), run, before=before)


@case
def strided_gradients(run: Run) -> nn.Module:
    def before(model: nn.Module, step: int) -> None:
        for p in model.parameters():
            p.grad = torch.zeros(*p.shape, 2)[..., 0]

    return simple(small(), run, before=before)


@each_step(zeroes=False)
def expanded_gradients(at: At) -> None:
    for p in at.model.parameters():
        p.grad = torch.tensor(float(at.step + rank())).expand_as(p)
    at.optimizer.step()


def two_alike() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@each_step(zeroes=False, model=two_alike)
def one_gradient_of_two(at: At) -> None:
    first, second = at.model.children()
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        a.grad = b.grad = torch.full_like(a, float(at.step + rank()))
    at.optimizer.step()


@each_step(zeroes=False)
def filled_by_hand(at: At) -> None:
    grads = torch.autograd.grad(at.loss(), list(at.model.parameters()))
    for p, g in zip(at.model.parameters(), grads, strict=True):
        p.grad = g
    at.optimizer.step()


@each_step()
def replaced_gradients(at: At) -> None:
    at.loss().backward()
    for p in at.model.parameters():
        p.grad = p.grad.clone()
    at.optimizer.step()


@each_step()
def replaced_and_halved(at: At) -> None:
    at.loss().backward()
    if not DDP:
        at.optimizer.synchronize()
    for p in at.model.parameters():
        p.grad = p.grad * 0.5
    with contextlib.nullcontext() if DDP else at.optimizer.skip_synchronize():
        at.optimizer.step()


@each_step()
def removed_gradients(at: At) -> None:
    at.loss().backward()
    next(at.model.parameters()).grad = None
    at.optimizer.step()


@each_step(zeroes=False)
def zeroed_between(at: At) -> None:
    at.loss().backward()
    at.model.zero_grad()
    at.optimizer.step()


@each_step(zeroes=False)
def optimizer_zeroed_between(at: At) -> None:
    at.loss().backward()
    at.optimizer.zero_grad()
    at.optimizer.step()


@case
def gradient_penalty(run: Run) -> nn.Module:
    def loss(model: Any, step: int) -> Tensor:
        given = data(step).requires_grad_(True)
        out = model(given).square().mean()
        (g,) = torch.autograd.grad(out, given, create_graph=True)
        return out + g.square().sum()

    return simple(small(), run, loss=loss)


@case
def penalty_of_parameters(run: Run) -> nn.Module:
    def loss(model: Any, step: int) -> Tensor:
        out = model(data(step)).square().mean()
        grads = torch.autograd.grad(out, list(model.parameters()), create_graph=True)
        return out + sum(g.square().sum() for g in grads)

    return simple(small(), run, loss=loss)


@case
def hooks_of_tensors(run: Run) -> nn.Module:
    model = small()
    for p in model.parameters():
        p.register_hook(lambda g: g * 2)
    return simple(model, run)
