"""Named parameters as users give them: checked, and their names without what wrappers of a model put into them.

``DistributedDataParallel(model)`` and ``torch.compile(model)`` name a parameter ``fc.weight`` of the model
``module.fc.weight`` and ``_orig_mod.fc.weight``. Names are part of plans, patterns and saved states, and these should
be the same with and without a wrapper. So ``_orig_mod.`` and ``_checkpoint_wrapped_module.`` (activation
checkpointing), which only torch writes, are left out wherever they stand, and ``module.`` in front where all names
begin with it. A pattern may fit either the name that was given or the shorter one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..errors import ConfigError
from ..schedule.plan import Plan
from .methods import Methods
from .shards import local

_OF_TORCH, _WRAPPED = ("_orig_mod.", "_checkpoint_wrapped_module."), "module."
#: As whole parts of a name, or of a pattern: `my_orig_mod.` is the user's.
_PARTS = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, _OF_TORCH))})")


def _without_torch(name: str) -> str:
    return _PARTS.sub("", name)


def without_wrappers(names: Collection[str]) -> dict[str, str]:
    """Return the names to use by those that are given, for those that change; none where two would become one."""
    found = {name: _without_torch(name) for name in names}
    while found and all(name.startswith(_WRAPPED) for name in found.values()):
        found = {name: short.removeprefix(_WRAPPED) for name, short in found.items()}
    if len(set(found.values())) < len(found) or "" in found.values():
        return {}
    return {name: short for name, short in found.items() if short != name}


def of_pairs(given: object) -> dict[str, str]:
    """Return :func:`without_wrappers` of (name, parameter) pairs; of anything else, none."""
    return without_wrappers(_given_names(given))


def _given_names(given: object) -> list[str]:
    pairs = given if isinstance(given, list) else []
    return [pair[0] for pair in pairs] if all(_is_pair(pair) for pair in pairs) else []


def _is_pair(pair: object) -> bool:
    return isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], nn.Parameter)


def in_arguments(given: Any, method: Any, options: Mapping[str, Any]) -> tuple[Any, Any, Mapping[str, Any], str]:
    """Return what a compression is given with the names to use, and what is to be said of that.

    Args:
        given: (name, parameter) pairs in a list; anything else is returned as it is.
    """
    changed = of_pairs(given)
    own = [changed.get(name, name) for name in _given_names(given)]
    options = in_options(options, own)
    if not changed:
        return given, method, options, ""
    given = [(name, parameter) for name, (_, parameter) in zip(own, given, strict=True)]
    if isinstance(method, Methods):  # patterns fit the names to use, or the given ones; the shorter ones are saved
        longer, short = {name: before for before, name in changed.items()}, _shortening(changed)
        method = replace(method, given=longer, shown={pattern: short(pattern) for pattern, _ in method.rules})
    return given, method, options, _in_words(changed)


def _in_words(changed: Mapping[str, str]) -> str:
    before, name = next(iter(changed.items()))
    found = {part for each in changed for part in _PARTS.findall(each)}
    inside = [f"{part} is left out of names" for part in _OF_TORCH if part in found]
    in_front = len(_without_torch(before)) > len(name)
    wrapped = [f"all names begin with {_WRAPPED}, which is left out"] if in_front else []
    return f"{', and '.join(wrapped + inside)}: {before} is called {name} here, and in saved states"


def in_options(options: Mapping[str, Any], own: Collection[str]) -> Mapping[str, Any]:
    """Return options in which a given plan that was made with the names of a wrapper has the names to use.

    Args:
        own: these names; a plan that has some of them stays as it is.
    """
    given = options.get("schedule")
    if not isinstance(given, Plan) or set(given.names()) & set(own):
        return options
    return {**options, "schedule": Plan.from_document(_renamed(given.document(), without_wrappers(given.names())))}


def _renamed(part: Any, changed: Mapping[str, str]) -> Any:
    """Return plain data and tensors in which names, also as keys, are replaced."""
    if isinstance(part, Mapping):
        return {changed.get(key, key): _renamed(value, changed) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return [_renamed(value, changed) for value in part]
    return changed.get(part, part) if isinstance(part, str) else part


def _shortening(changed: Mapping[str, str]) -> Callable[[str], str]:
    """Return what takes out of a pattern what was taken out of names."""
    given, name = next(iter(changed.items()))
    fronts = (len(_without_torch(given)) - len(name)) // len(_WRAPPED)

    def short(pattern: str) -> str:
        pattern = _without_torch(pattern)
        for _ in range(fronts):
            pattern = pattern.removeprefix(_WRAPPED)
        return pattern

    return short


# ---- what is given as named_parameters -----------------------------------------------------------

_WANTED = "named_parameters should be (name, parameter) pairs: write model.named_parameters(), got"


def listed(given: object) -> object:
    """Return a list of what an iterator gives; what :func:`pairs` refuses stays as it is, for its error."""
    if isinstance(given, (nn.Module, Mapping, str)) or not isinstance(given, Iterable):
        return given
    return list(given)


def pairs(given: object) -> list[tuple[str, nn.Parameter]]:
    """Return the pairs of name and parameter that were given as ``named_parameters``.

    Raises:
        ConfigError: these are none, or a parameter has no shape yet, or no memory of its own.
    """
    if isinstance(given, (nn.Module, Mapping, str)) or not isinstance(given, Iterable):
        raise ConfigError(f"{_WANTED} {_article(given)}{'; call it' if inspect.isroutine(given) else ''}")
    found = list(given)
    for pair in found:
        if problem := _problem(pair):
            raise ConfigError(f"{_WANTED} {problem}")
    for name, parameter in found:
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"parameter {name} has no shape yet, as in LazyLinear: run a forward pass of the model before you "
                "create the compression and the optimizer"
            )
        part = local(parameter)
        if parameter.requires_grad and hasattr(part, "__tensor_flatten__"):
            raise ConfigError(
                f"parameter {name} has the class {type(part).__name__}, which keeps its numbers in other tensors, "
                "and so may its gradient: train it as a torch.Tensor, or freeze it with requires_grad_(False)"
            )
    return found


def _problem(pair: object) -> str:
    """Return what is wrong with a pair, empty if nothing is."""
    if not isinstance(pair, tuple):
        return f"{_article(pair)} without a name" if isinstance(pair, nn.Parameter) else f"{_article(pair)} among them"
    if len(pair) != 2:
        return f"a tuple of {len(pair)} among them"
    name, parameter = pair
    if not isinstance(name, str):
        return f"the name {name!r:.100}, which is not a string"
    trained = isinstance(parameter, Tensor) and parameter.is_leaf and parameter.requires_grad
    return "" if trained or isinstance(parameter, nn.Parameter) else f"{_article(parameter)} as the parameter {name!r}"


def _article(value: object) -> str:
    """Return what kind of thing a value is, in words."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"
