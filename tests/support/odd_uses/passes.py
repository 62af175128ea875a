"""Backward passes and steps in odd numbers and orders, with errors, and with closures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.rank import rank

from .run import STEPS, At, Run, case, data, each_step, loss_of, simple, small


@case
def a_model_called_twice(run: Run) -> nn.Module:
    return simple(small(), run, loss=lambda model, step: loss_of(model, step) + loss_of(model, step + 50))


@case
def flipped(run: Run) -> nn.Module:
    def before(model: Any, step: int) -> None:
        model[0].requires_grad_(step % 2 == 0)

    return simple(small(), run, before=before, steps=5)


@each_step(steps=2)
def create_graph(at: At) -> None:
    at.loss().backward(create_graph=True)
    at.optimizer.step()


@each_step(steps=2)
def double_backward_over_create_graph(at: At) -> None:
    at.loss().backward(create_graph=True)
    sum(p.grad.square().sum() for p in at.model.parameters()).backward()
    at.optimizer.step()


@each_step()
def backward_twice(at: At) -> None:
    loss = at.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    at.optimizer.step()


@each_step()
def two_passes_in_one_step(at: At) -> None:
    at.loss().backward()
    loss_of(at.called, at.step + 50).backward()
    at.optimizer.step()


@each_step(zeroes=False)
def never_zeroed(at: At) -> None:
    at.loss().backward()
    at.optimizer.step()


@each_step(zeroes=False)
def a_step_without_backward_first(at: At) -> None:
    if not at.step:
        at.optimizer.step()
    at.optimizer.zero_grad()
    at.loss().backward()
    at.optimizer.step()


@each_step()
def a_step_without_backward_between(at: At) -> None:
    if at.step != 2:
        at.loss().backward()
    at.optimizer.step()


@each_step()
def two_steps_of_one_backward(at: At) -> None:
    at.loss().backward()
    at.optimizer.step()
    at.optimizer.step()


@case
def inference_between(run: Run) -> nn.Module:
    model = small()

    def loss(called: Any, step: int) -> Tensor:
        found = loss_of(called, step)
        with torch.inference_mode():
            model.eval()
            model(data(step))
            model.train()
        return found

    return simple(model, run, loss=loss)


@case
def an_error_in_backward_on_all_ranks(run: Run) -> nn.Module:
    return _interrupted(run, True)


@case
def an_error_in_backward_on_one_rank(run: Run) -> nn.Module:
    return _interrupted(run, rank() == 1)


def _interrupted(run: Run, here: bool) -> nn.Module:
    model, fails = small(), [here]

    def fail(grad: Tensor) -> None:
        if fails[0]:
            fails[0] = False
            raise RuntimeError("no luck")

    called, optimizer = run.start(model)
    model[0].weight.register_hook(fail)
    for step in range(STEPS):
        for _ in range(2):
            try:
                optimizer.zero_grad()
                loss_of(called, step).backward()
                break
            except RuntimeError as error:
                if "no luck" not in str(error):
                    raise
        optimizer.step()
    return model


def _with_closure(at: At) -> None:
    def closure() -> Tensor:
        at.optimizer.zero_grad()
        loss = at.loss()
        loss.backward()
        return loss

    at.optimizer.step(closure)


@each_step(zeroes=False, optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=4))
def lbfgs(at: At) -> None:
    _with_closure(at)


@each_step(zeroes=False, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01))
def closure_of_adam(at: At) -> None:
    _with_closure(at)


@each_step()
def backward_of_some_inputs(at: At) -> None:
    *_, last = at.model.children()
    at.loss().backward(inputs=list(last.parameters()))
    at.optimizer.step()
