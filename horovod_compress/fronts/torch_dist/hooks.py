"""What torch calls for a registered module: at each of its gradients, and before the first forward passes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ...errors import ConfigError
from . import checks


class GradientHook:
    """What torch calls for each parameter; the garbage collector sees nothing of what it refers to.

    Args:
        unwrapped: takes the gradients.
    """

    def __init__(self, unwrapped: Any) -> None:
        self._unwrapped = weakref.ref(unwrapped)

    def __call__(self, parameter: Tensor) -> None:
        if (found := self._unwrapped()) is None:
            raise ConfigError(
                "the module that this compression was registered with is gone, and so is the compression; register "
                "the module that is trained, and keep it or the compression"
            )
        found.take(parameter)

    def is_over(self) -> bool:
        found = self._unwrapped()
        return found is None or found.is_over()


#: A compression stays as long as the module that it exchanges the gradients of, whether or not a program keeps it.
in_use: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


def leave_other(parameters: Iterable[nn.Parameter]) -> None:
    """Take the hooks of a closed compression from the parameters of a module.

    Raises:
        ConfigError: they have one that is in use.
    """
    for parameter in parameters:
        if _is_exchanged(parameter):
            raise ConfigError(
                "this module has a compression already, and register() is called once; call close() on that one "
                "first, or create the module again"
            )
        hooks: Any = parameter._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, GradientHook)]:
            del hooks[key]


def _is_exchanged(parameter: nn.Parameter) -> bool:
    hooks: Any = parameter._post_accumulate_grad_hooks or {}
    return any(isinstance(hook, GradientHook) and not hook.is_over() for hook in hooks.values())


def refuse_wrapped(module: nn.Module, *given: object) -> None:
    """Before a forward pass of a module, refuse DistributedDataParallel around it, which would average gradients too.

    Raises:
        ConfigError: says what to do.
    """
    wrapper = checks.averaging_wrapper()
    if wrapper is not None and any(map(_is_exchanged, checks.reduced(wrapper))):
        raise ConfigError(
            "this model is trained in DistributedDataParallel, which averages its gradients too: register the wrapped "
            "model, compression.register(ddp_model, optimizer), or call the model without the wrapper"
        )
