"""Looks before each step leave alone what optimizers are given, and come once gradients are there."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from horovod_compress.engine.optimizer.step_hooks import in_a_step
from horovod_compress.fronts.session import before_each_step


class Scaled(torch.optim.SGD):
    """A step of its own, which takes a number."""

    def step(self, scale: float = 1.0) -> float:  # type: ignore[override]
        return scale * 2


class Searching(torch.optim.SGD):
    """Calls its closure with arguments, as a line search does."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return closure(1, backward=True)


@pytest.fixture
def parameter() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2))


def closure(number: int = 0, *, backward: bool = False) -> tuple[int, bool]:
    return number, backward


@pytest.mark.parametrize("looks", [False, True])
def test_optimizers_get_what_they_are_given(parameter: nn.Parameter, looks: bool) -> None:
    seen: list[Any] = []
    end = before_each_step(seen.append, gradients=True)
    if not looks:
        end()
    scaled, searching = Scaled([parameter]), Searching([parameter])
    assert scaled.step(3.0) == 6.0 and scaled.step(scale=4.0) == 8.0
    assert searching.step(closure) == (1, True) and searching.step(closure=closure) == (1, True)
    assert len(seen) == 4 * looks
    end()


def test_a_closure_is_the_program_s_own_where_nothing_looks(parameter: nn.Parameter) -> None:
    class Keeping(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return closure

    optimizer = Keeping([parameter])
    end = before_each_step(lambda optimizer: None, gradients=True)
    assert optimizer.step(closure) is not closure  # the control
    end()
    assert optimizer.step(closure) is closure


def test_looks_at_gradients_come_after_the_closure_and_others_before(parameter: nn.Parameter) -> None:
    order: list[str] = []
    ends = [
        before_each_step(lambda optimizer: order.append("gradients"), gradients=True),
        before_each_step(lambda optimizer: order.append("step")),
    ]
    torch.optim.SGD([parameter], lr=0.1).step(lambda: order.append("closure"))  # type: ignore[arg-type, func-returns-value]
    for end in ends:
        end()
    assert order == ["step", "closure", "gradients"]


def test_what_is_within_a_step_knows_it(parameter: nn.Parameter) -> None:
    seen: list[tuple[str, bool]] = []

    class Looking(torch.optim.Optimizer):
        def step(self, closure: Any) -> None:  # type: ignore[override]
            closure()
            look("the weights move")()

    def look(name: str) -> Any:
        return lambda *given: seen.append((name, in_a_step()))

    optimizer = Looking([parameter], {})
    optimizer.register_step_pre_hook(look("first hooks"))
    optimizer.register_step_post_hook(look("last hooks"))
    look("before")()
    optimizer.step(look("closure"))
    look("after")()
    assert seen == [
        ("before", False), ("first hooks", True), ("closure", True), ("the weights move", True),
        ("last hooks", True), ("after", False),
    ]  # fmt: skip
