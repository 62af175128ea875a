"""What an optimizer's step is looked at for, as it would train ranks apart without an error of Horovod's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ...engine.optimizer.family import uncompiled
from ...errors import ConfigError
from ..common.unexchanged import Unexchanged
from .calls import await_tokens


def guard(optimizer: Any, names: Mapping[int, str] | None) -> None:
    """Refuse closures of a Horovod optimizer from now on, and tell of parameters that nobody reduces.

    Args:
        names: of parameters, by identity, if this rank tells of them.
    """
    optimizer.register_step_pre_hook(uncompiled(refuse_closure))
    if names is None:
        return
    words = "optimizer and compression", "model, optimizer and compression"  # a model keeps the hooks of Horovod's
    unexchanged = Unexchanged(lambda: _others(optimizer.param_groups, optimizer._requires_update, names), *words)

    def look(*given: Any) -> None:
        if not optimizer._handles:  # else Horovod has not fetched the results yet
            unexchanged.look()

    optimizer.register_step_pre_hook(uncompiled(look))


def leave_before_loading(optimizer: Any, leave: Callable[[], bool]) -> None:
    """Give up the step under way before an optimizer loads a state, whereupon Horovod forgets that step.

    Args:
        leave: does so; returns whether all ranks have handed over all tokens of the step.
    """
    stock = optimizer.load_state_dict

    @functools.wraps(stock)
    def load(*given: Any, **options: Any) -> Any:
        if leave():
            await_tokens(optimizer)
        return stock(*given, **options)

    optimizer.load_state_dict = load


def refuse_closure(optimizer: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuse a closure, before a step: its gradients would come after Horovod has reduced those of the step.

    Raises:
        ConfigError: says what to do.
    """
    closure = options.get("closure", given[1] if len(given) > 1 else None)
    if closure is not None and optimizer._should_synchronize:  # else the closure may do so itself
        raise ConfigError(
            "step(closure) would run its backward pass after the gradients were reduced, and ranks would drift apart; "
            "call the closure before step(), or use DistributedUpdateOptimizer, whose local steps accept one"
        )


def _others(
    groups: Iterable[dict[str, Any]], exchanged: Container[Any], names: Mapping[int, str]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield what an optimizer has and ranks do not exchange, with names for people."""
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group["params"]):
            if parameter not in exchanged:
                yield names.get(id(parameter)) or _place_in_words(number, place, parameter), parameter


def _place_in_words(number: int, place: int, parameter: nn.Parameter) -> str:
    return f"parameter {place} of group {number}, of shape {tuple(parameter.shape)}"


def left_out(groups: Iterable[dict[str, Any]], exchanged: Container[Any]) -> str | None:
    """Return in words a parameter that is stepped with this rank's own gradient, None if there is none.

    Args:
        groups: of an optimizer.
        exchanged: the parameters whose gradients or updates ranks exchange.
    """
    for name, parameter in _others(groups, exchanged, {}):
        if parameter.requires_grad and parameter.grad is not None:
            return f"{name},"
    return None
