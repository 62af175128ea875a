"""What an optimizer's step is looked at for, as it would train ranks apart without an error of Horovod's."""

from __future__ import annotations

import logging
from typing import Any

from ...errors import ConfigError

_log = logging.getLogger("horovod_compress")


def guard(optimizer: Any, tells: bool) -> None:
    """Refuse closures of a Horovod optimizer from now on, and tell of parameters that nobody reduces.

    Args:
        tells: this rank does.
    """
    optimizer.register_step_pre_hook(refuse_closure)
    if tells:
        optimizer.register_step_pre_hook(Unreduced())


def refuse_closure(optimizer: Any, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Refuse a closure, before a step: its gradients would come after Horovod has reduced those of the step.

    Raises:
        ConfigError: says what to do.
    """
    if options.get("closure", given[1] if len(given) > 1 else None) is not None:
        raise ConfigError(
            "step(closure) would run its backward pass after the gradients were reduced, and ranks would drift apart; "
            "call the closure before step(), or use DistributedUpdateOptimizer, whose local steps take one"
        )


class Unreduced:
    """Warns once of a parameter that the optimizer steps with this rank's own gradient."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, optimizer: Any, *given: Any) -> None:
        if self._told or optimizer._handles:  # Horovod has not fetched the results yet
            return
        if found := _unreduced(optimizer):
            self._told = True
            _log.warning(
                "%s, so ranks will differ in it; let it need a gradient when the optimizer is made, and freeze it then",
                found,
            )


def _unreduced(optimizer: Any) -> str | None:
    """Return in words a parameter that an optimizer steps with this rank's own gradient, None if there is none."""
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if parameter.requires_grad and parameter.grad is not None and parameter not in optimizer._requires_update:
                return (
                    f"parameter {place} of group {number}, of shape {tuple(parameter.shape)}, has a gradient that "
                    f"nobody reduces, as it was frozen or not there when the optimizer was made"
                )
    return None
