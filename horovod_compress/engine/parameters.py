"""What a user gives as ``named_parameters``, checked."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..errors import ConfigError

_WANTED = "named_parameters should be (name, parameter) pairs: write model.named_parameters(), got"


def listed(given: object) -> object:
    """Return a list of what an iterator gives; what :func:`pairs` refuses stays as it is, for its error."""
    if isinstance(given, (nn.Module, Mapping, str)) or not isinstance(given, Iterable):
        return given
    return list(given)


def pairs(given: object) -> list[tuple[str, nn.Parameter]]:
    """Return the pairs.

    Raises:
        ConfigError: these are none, or a parameter has no shape yet.
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
