"""Gradients that autograd has just made are moved out of memory of others, and no other is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from horovod_compress.fronts import fresh
from horovod_compress.fronts.fresh import FreshGradients
from tests.support.nets import OfOne

Forward = Callable[[Tensor, Tensor], Tensor]


class OfNumpy(torch.autograd.Function):
    """A sum, whose gradients are two tensors of one array."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        array = grad.numpy().copy()
        return torch.from_numpy(array), torch.from_numpy(array)


NONE = torch.zeros(1)
SHARED: dict[str, Forward] = {
    "a view": lambda left, right: left * 2 + right.unsqueeze(0),
    "one that overlaps": lambda left, right: torch.cat([left[0], NONE]) + torch.cat([NONE, right]),
    "an array": lambda left, right: OfNumpy.apply(left * 2, right.unsqueeze(0)),
}


def no_hook(parameter: nn.Parameter) -> None:
    """Take no gradients."""


def framework(parameter: nn.Parameter) -> object:
    """Take gradients as Horovod does."""
    node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *given: None)
    return node


def pair() -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(torch.tensor([[1.0, 2.0]])), nn.Parameter(torch.tensor([3.0, 4.0]))


def moved(forward: Forward, hook: Callable[[nn.Parameter], object]) -> list[bool]:
    """Return for each parameter whether its gradient was moved from where it came."""
    parameters, came = pair(), [0, 0]
    for at, parameter in enumerate(parameters):
        parameter.register_hook(lambda grad, at=at: came.__setitem__(at, grad.data_ptr()))
    kept = [hook(parameter) for parameter in parameters]
    watch = FreshGradients(parameters)
    forward(*parameters).square().sum().backward()
    watch.close()
    del kept
    grads = [parameter.grad for parameter in parameters]
    return [grad is not None and grad.data_ptr() != place for grad, place in zip(grads, came, strict=True)]


@pytest.mark.parametrize("hook", [no_hook, framework])
def test_what_is_shared_is_moved_and_nothing_else(hook: Callable[[nn.Parameter], object]) -> None:
    assert fresh._alone().keys() == {False, True}  # this version of torch counts
    for name, forward in SHARED.items():
        assert any(moved(forward, hook)), name
    # The controls: products and their like have memory of their own, of any shape.
    assert moved(lambda left, right: left * 2 + right * 3, hook) == [False, False]
    assert moved(lambda left, right: left.t() @ right.unsqueeze(0), hook) == [False, False]


def test_all_is_moved_where_torch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "_alone", dict)
    assert moved(lambda left, right: left * 2 + right * 3, no_hook) == [True, True]


@pytest.mark.parametrize("counts", [None, lambda memory: 7])
def test_a_version_that_counts_nothing_or_always_the_same_is_seen(counts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "_references", counts)
    assert fresh._alone.__wrapped__() == {}


def test_all_views_are_moved_where_torch_does_not_count_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "_uses", None)
    monkeypatch.setattr(fresh, "_alone", fresh._alone.__wrapped__)
    assert moved(lambda left, right: left * 2 + right * 3, no_hook) == [False, False]
    assert moved(lambda left, right: left.t() @ right.unsqueeze(0), no_hook) != [False, False]
    assert any(moved(SHARED["a view"], no_hook))


@pytest.mark.parametrize("others", ["laid too", "without", "frozen", "none"])
def test_gradients_stay_where_a_program_has_laid_them(others: str) -> None:
    first, other = pair()
    array = torch.zeros(2, 2)
    places = array[:1], array[1]
    other.requires_grad_(others != "frozen")
    watch = FreshGradients([first] if others == "none" else [other, first])
    for place, one in zip(places, (first, other), strict=True):
        if one is first or others in ("laid too", "none"):
            one.grad = torch.zeros_like(place)
            one.grad.data = place
    (first + other.unsqueeze(0)).square().sum().backward()
    assert first.grad is not None and first.grad.tolist() == places[0].tolist() == [[8.0, 12.0]]
    watch.close()


def test_a_gradient_of_torch_autograd_grad_counts_for_nothing() -> None:
    """It calls the same hooks, and adds nothing up; what comes next may be laid by the program."""
    first, other = pair()
    watch = FreshGradients([first, other])
    torch.autograd.grad((first + other.unsqueeze(0)).square().sum(), [first, other])
    place = torch.zeros(1, 2)
    first.grad = torch.zeros(1, 2)
    first.grad.data = place
    (first + other.unsqueeze(0)).square().sum().backward()
    assert place.tolist() == [[8.0, 12.0]]
    watch.close()


def test_views_that_a_program_keeps_see_results() -> None:
    """In a hook that was there before: as for a log, or for clipping all at once."""
    parameters, views = pair(), []
    for one in parameters:
        one.register_post_accumulate_grad_hook(lambda one: views.append(one.grad.view(-1)))
    watch = FreshGradients(parameters)
    (parameters[0] * 2 + parameters[1].unsqueeze(0)).square().sum().backward()
    for one in parameters:
        assert one.grad is not None
        one.grad.zero_()  # as a result is written there
    assert len(views) == 2 and not any(view.any() for view in views)
    watch.close()


@pytest.mark.parametrize("hook", [no_hook, framework])
@pytest.mark.parametrize("watched", [True, False])
def test_other_hooks_of_a_program_find_memory_as_without(hook: Callable[[nn.Parameter], object], watched: bool) -> None:
    """Of a sum, torch copies one of the two gradients: a hook that halves them in place halves each once."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for one in parameters:
        one.register_post_accumulate_grad_hook(halve)
    kept: list[object] = [hook(one) for one in parameters]
    if watched:
        kept.append(FreshGradients(parameters))
    (torch.ones(2, 2) * (parameters[0] + parameters[1])).sum().backward()  # their gradient is a view
    assert [one.grad.tolist() for one in parameters if one.grad is not None] == [[1.0, 1.0]] * 2
    del kept


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_a_function_may_bring_no_gradient() -> None:
    first, other = pair()
    watch = FreshGradients([first, other])
    OfOne.apply(first, other).sum().backward()
    assert first.grad is not None and first.grad.tolist() == [[2.0, 2.0]] and other.grad is None
    watch.close()


def test_nothing_stays_on_parameters() -> None:
    first, other = pair()
    other.requires_grad_(False)
    for closes in (True, False):
        watch = FreshGradients([first, other])
        assert first._backward_hooks and not other.requires_grad
        gone = weakref.ref(watch)
        if closes:
            watch.close()
        del watch
        gc.collect()
        assert gone() is None and not first._backward_hooks
