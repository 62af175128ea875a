"""What torch calls for a registered module at each of its gradients, and the wrappers that average these as well."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ...engine.optimizer.step_hooks import uncompiled
from ...errors import ConfigError
from . import checks


class ParameterHook:
    """What torch calls for each gradient of a parameter, in a compiled step too, which leaves it as it is.

    Args:
        call: the garbage collector sees nothing of what it refers to.
    """

    def __init__(self, call: Callable[[nn.Parameter], object]) -> None:
        self._call = uncompiled(call)

    def __call__(self, parameter: nn.Parameter) -> None:
        self._call(parameter)


class GradientHook(ParameterHook):
    """What hands gradients over.

    Args:
        unwrapped: takes them.
    """

    def __init__(self, unwrapped: Any) -> None:
        self._unwrapped = weakref.ref(unwrapped)
        super().__init__(partial(_hand_over, self._unwrapped))

    def is_over(self) -> bool:
        found = self._unwrapped()
        return found is None or found.is_over()


def _hand_over(unwrapped: weakref.ref[Any], parameter: nn.Parameter) -> None:
    if (found := unwrapped()) is None:
        raise ConfigError(
            "the module that this compression was registered with is gone, and so is the compression; register "
            "the module that is trained, and keep it or the compression"
        )
    found.take(parameter)


class _Kept:
    """Lets a module keep what exchanges its gradients; in copies, and in files, None stands for it."""

    def __init__(self, unwrapped: Any) -> None:
        self._unwrapped = unwrapped

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


def keep(module: nn.Module, unwrapped: Any) -> None:
    """Let a compression stay as long as the module, whether or not a program keeps it.

    The module itself has it: a hook of the program may lead from a parameter back to the module, and the garbage
    collector finds no way round through a dictionary with weak keys.
    """
    module.__dict__["_horovod_compress"] = _Kept(unwrapped)


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
                "first, in a notebook before its name is given to another; or create the module again"
            )
        for key in ours:
            del hooks[key]


#: By wrapper, the parameters that needed a gradient when it was made, by identity: it averages no others.
_wrappers: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = weakref.WeakKeyDictionary()


def _look(*given: Any) -> None:
    """Note a wrapper as it is made; torch calls this for every module that is put into another one.

    It may be a part of what torch.compile compiles, or compiled by itself: no module that is half made may be an
    argument of its own then.
    """
    if given[1] != "module":
        return
    made, _, module = given
    # By its type: a compiled module that is half made does not know its class.
    if issubclass(type(made), DistributedDataParallel) and module is not None:
        _wrappers[made] = frozenset(id(p) for p in module.parameters() if p.requires_grad)


def _subclasses(kind: type) -> Iterator[type]:
    found: list[type] = kind.__subclasses__()
    for one in found:
        yield one
        yield from _subclasses(one)


def _look_for_others() -> None:
    """Note wrappers that were made before the import of this module, or as copies, which are put together otherwise."""
    if dist.is_available() and dist.is_initialized():
        kinds = {DistributedDataParallel, *_subclasses(DistributedDataParallel)}
        for found in gc.get_objects():  # there may be millions
            if type(found) in kinds and found not in _wrappers:
                _look(found, "module", found.__dict__.get("_modules", {}).get("module"))


register_module_module_registration_hook(_look)
_look_for_others()


class Wrappers:
    """Each DistributedDataParallel of this process that has some of the parameters of a module.

    Args:
        parameters: of the module.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._ours = frozenset(map(id, parameters))
        self._begun: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        _look_for_others()
        self.leave_begun()

    def leave_begun(self) -> None:
        """Take those of static graphs that have averaged by now for done with that."""
        self._begun.update(wrapper for wrapper in list(_wrappers) if _has_begun(wrapper))

    def average(self) -> bool:
        """Return whether one averages gradients of the parameters; at the end of a backward pass, before it has."""
        several = [(wrapper, mine) for wrapper, its in list(_wrappers.items()) if (mine := self._ours & its)]
        return any(
            self._is_open(wrapper) and any(id(parameter) in mine for parameter in checks.reduced(wrapper))
            for wrapper, mine in several
        )

    def _is_open(self, wrapper: DistributedDataParallel) -> bool:
        """Return whether a wrapper has come to gradients, or to those that will not come, and not averaged them yet."""
        if _has_begun(wrapper) and wrapper not in self._begun:  # in its first pass it has averaged them already
            return True
        try:
            wrapper.reducer._check_reducer_finalized()
        except AttributeError:  # it was refused itself, half made
            return False
        except RuntimeError:
            return True
        return False


def _has_begun(wrapper: DistributedDataParallel) -> bool:
    """Return whether the wrapper of a static graph has averaged gradients at all."""
    return bool(wrapper.__dict__.get("static_graph") and wrapper.__dict__.get("_static_graph_delay_allreduce_enqueued"))
