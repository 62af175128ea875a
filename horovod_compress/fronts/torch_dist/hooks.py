"""What torch calls for a registered module at each of its gradients, and the wrappers that average these as well."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ...engine.optimizer.family import uncompiled
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
        hooks: Any = parameter._post_accumulate_grad_hooks or {}
        ours = {key: hook for key, hook in hooks.items() if isinstance(hook, GradientHook)}
        if not all(hook.is_over() for hook in ours.values()):
            raise ConfigError(
                "this module has a compression already, and register() is called once; call close() on that one "
                "first, or create the module again"
            )
        for key in ours:
            del hooks[key]


class Wrappers:
    """Each DistributedDataParallel of this process that has parameters of a module, now or later.

    Args:
        parameters: of the module.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._ours = frozenset(map(id, parameters))
        #: By wrapper, those of the parameters that needed a gradient when it was made: it leaves out the others.
        self._found: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = weakref.WeakKeyDictionary()
        for found in gc.get_objects():
            if issubclass(type(found), DistributedDataParallel) and isinstance(found.__dict__.get("_modules"), dict):
                self.look(found, found._modules.get("module"))
        _look_at_modules()
        _looking.add(self)

    def look(self, wrapper: DistributedDataParallel, module: nn.Module | None) -> None:
        """Look at a wrapper that is made, around a module."""
        parameters = () if module is None else module.parameters()
        if mine := self._ours.intersection(id(parameter) for parameter in parameters if parameter.requires_grad):
            self._found[wrapper] = mine

    def average(self) -> bool:
        """Return whether one averages gradients of the parameters; at the end of a backward pass, before it has."""
        open_ones = ((wrapper, mine) for wrapper, mine in list(self._found.items()) if _is_open(wrapper))
        return any(id(parameter) in mine for wrapper, mine in open_ones for parameter in checks.reduced(wrapper))


def _is_open(wrapper: Any) -> bool:
    """Return whether a wrapper has come to a gradient, or looked for those that will not come, and not ended since."""
    try:
        wrapper.reducer._check_reducer_finalized()
    except AttributeError:  # it was refused itself, half made
        return False
    except RuntimeError:
        return True
    return False


_looking: weakref.WeakSet[Wrappers] = weakref.WeakSet()


@cache
def _look_at_modules() -> object:
    """Have all that look see each wrapper as it is made; torch goes through its hooks meanwhile, so this one stays."""

    def look(made: nn.Module, name: str, module: nn.Module | None) -> None:
        # By its type: a compiled module that is half made does not know its class.
        if name == "module" and issubclass(type(made), DistributedDataParallel):
            for each in list(_looking):
                each.look(made, module)  # type: ignore[arg-type]

    return register_module_module_registration_hook(uncompiled(look))
