"""Whether gradients were cleared before new ones came, as autograd sees it."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

from horovod_compress.engine.optimizer.matching import Cleared

LAYERS = 5


def model() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(LAYERS)])


def kept_now(cleared: Cleared) -> bool:
    """Begin a step, and return what it begins with."""
    cleared.begin()
    return cleared.most_kept()


def add(layers: nn.ParameterList, used: int = LAYERS) -> None:
    """Let a pass add to the gradients."""
    sum(layer.square().sum() for layer in [*layers][:used]).backward()  # type: ignore[union-attr]


def keep(layers: nn.ParameterList) -> None:
    pass


def drop(layers: nn.ParameterList) -> None:
    for layer in layers:
        layer.grad = None


def zero(layers: nn.ParameterList) -> None:
    for layer in layers:
        assert layer.grad is not None
        layer.grad.zero_()


def drop_late(layers: nn.ParameterList) -> None:
    """Clear behind a pass that has come upon results, as a program does that skips a batch."""
    add(layers)
    drop(layers)


def look_only(layers: nn.ParameterList) -> None:
    """A gradient that is asked for by name adds to nothing."""
    torch.autograd.grad(layers[0].square().sum(), [layers[0]])
    drop(layers)


@pytest.mark.parametrize(
    ("between", "kept"), [(keep, True), (drop, False), (zero, False), (drop_late, False), (look_only, False)]
)
@pytest.mark.parametrize("passes", [1, 3])
def test_what_passes_come_upon_counts(between: Callable[[nn.ParameterList], None], kept: bool, passes: int) -> None:
    """All gradients are filled when the step begins, as by one bucket or by passes that exchange nothing."""
    layers = model()
    cleared = Cleared([*layers], lambda: True)
    add(layers)  # as results lie there
    kept_now(cleared)
    between(layers)
    for _ in range(passes):
        add(layers)
    assert kept_now(cleared) is kept
    assert all(layer.grad is not None and layer.grad.any() for layer in layers)  # the control: they do not tell


def test_a_pass_that_is_under_way_is_not_looked_at() -> None:
    """It goes on behind the begin of its step, and may come upon what was there before the last results."""
    layers, is_between = model(), True
    cleared = Cleared([*layers], lambda: is_between)
    add(layers)
    assert not kept_now(cleared)
    is_between = False
    add(layers)
    is_between = True
    drop(layers)
    add(layers)
    assert not kept_now(cleared)


def test_the_first_gradient_of_a_pass_says_that_they_were_cleared() -> None:
    """A step may begin there, behind a pass that has come upon results and exchanged nothing."""
    layers = model()
    cleared = Cleared([*layers], lambda: True)
    add(layers)
    cleared.begin()
    add(layers)
    drop(layers)
    add(layers, used=1)
    assert not kept_now(cleared)


def test_a_step_begins_anew() -> None:
    """What an earlier step began with is nothing to the next one, also where nobody has asked."""
    layers = model()
    cleared = Cleared([*layers], lambda: True)
    add(layers)
    cleared.begin()
    add(layers)
    assert kept_now(cleared)


def test_without_a_watched_gradient_what_there_is_has_to_do() -> None:
    layers = model()
    cleared = Cleared([*layers], lambda: False)  # as those that ranks have parts of
    add(layers, used=2)
    assert not kept_now(cleared)
    add(layers)
    assert kept_now(cleared)


def test_nobody_is_kept_alive() -> None:
    layers = model()
    cleared = Cleared([*layers], lambda: True)
    gone = [weakref.ref(cleared), *map(weakref.ref, layers)]
    del cleared
    gc.collect()
    assert gone[0]() is None
    add(layers)
    del layers
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_a_program_may_send_its_model_to_another_process() -> None:
    """Hooks are no part of it, and refer to no parameter: torch can swap those that nothing refers to weakly."""
    layers = model()
    cleared = Cleared([*layers], lambda: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ForkingPickler.dumps(layers)
        copy.deepcopy(layers)
    assert not any(weakref.getweakrefs(layer) for layer in layers)
    add(layers)
    cleared.begin()


def test_no_parameter_trains() -> None:
    layers = model().requires_grad_(False)
    assert not kept_now(Cleared([*layers], lambda: True))
