"""What an optimizer's step is looked at for, as it would train ranks apart without an error of Horovod's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Iterable
from typing import Any

from ...errors import ConfigError
from .calls import await_tokens

_log = logging.getLogger("horovod_compress")


def guard(optimizer: Any, tells: bool) -> None:
    """Refuse closures of a Horovod optimizer from now on, and tell of parameters that nobody reduces.

    Args:
        tells: this rank does.
    """
    optimizer.register_step_pre_hook(refuse_closure)
    if tells:
        optimizer.register_step_pre_hook(Unreduced())


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


class Unreduced:
    """Warns once of a parameter that the optimizer steps with this rank's own gradient."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, optimizer: Any, *given: Any) -> None:
        if self._told or optimizer._handles:  # Horovod has not fetched the results yet
            return
        if found := left_out(optimizer.param_groups, optimizer._requires_update):
            self._told = True
            _log.warning(
                "%s has a gradient that is never reduced, because it was frozen or missing when the optimizer was "
                "created, so it will differ between ranks; set requires_grad before you create the optimizer, and "
                "freeze it later",
                found,
            )


def left_out(groups: Iterable[dict[str, Any]], exchanged: Container[Any]) -> str | None:
    """Return in words a parameter that is stepped with this rank's own gradient, None if there is none.

    Args:
        groups: of an optimizer.
        exchanged: the parameters whose gradients or updates ranks exchange.
    """
    for number, group in enumerate(groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter.grad is not None and parameter not in exchanged:
                return f"parameter {place} of group {number}, of shape {tuple(parameter.shape)},"
    return None
