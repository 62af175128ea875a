"""The model that is planned for: a table of this package, a CSV file like these, or what a function returns."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from . import shapes
from .shapes import Table, Tensor

_MODEL = "a torch.nn.Module, or (name, tensor or shape) pairs in forward order"


def read(text: str) -> Table:
    """Return the trainable parameters of a model, in forward order.

    Args:
        text: ``resnet50``, ``FILE.csv``, or ``module:function``, which is called without arguments and returns a
            ``torch.nn.Module`` or (name, tensor or shape) pairs in forward order; a third entry of such a pair may
            be the multiply-adds of its layer.

    Raises:
        ConfigError: there is no such model, or what it is makes no sense.
    """
    if ":" in text and not text.endswith(".csv"):
        return _table(text, _called(text))
    try:
        return _spread(shapes.load(text))
    except (ValueError, OSError) as error:
        other = "" if text.endswith(".csv") else ", or module:function"
        raise ConfigError(f"{error}{other}") from None


# ---- module:function --------------------------------------------------------------------------


def _called(text: str) -> object:
    try:
        return _function(text)()
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  it is the user's, and may raise anything
        raise ConfigError(f"{text} raised {type(error).__name__}: {error}") from None


def _function(text: str) -> Callable[[], object]:
    module_name, _, name = text.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script begins with its own folder only
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001  likewise
        raise ConfigError(f"--model {text}: importing {module_name!r} raised {type(error).__name__}: {error}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"--model {text}: {module_name} has no function {name!r}")
    return function


def _table(text: str, found: object) -> Table:
    try:
        entries = list(_entries(found))
    except (IndexError, TypeError):
        raise ConfigError(f"{text} should return {_MODEL}; got {type(found).__name__}") from None
    tensors = tuple(_checked(text, entry) for entry in entries)
    if not tensors:
        raise ConfigError(f"{text} returned no parameter that takes a gradient")
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise ConfigError(f"{text} returned two parameters with the same name")
    return _spread(Table(text, tensors))


def _checked(text: str, entry: tuple[Any, ...]) -> Tensor:
    try:
        return _tensor(*entry)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{text} should return {_MODEL}, sizes above 0 and multiply-adds of at least 0; "
            f"got the entry {entry!r:.200}"
        ) from None
    except RuntimeError:
        raise ConfigError(
            f"{text}: parameter {entry[0]} has no shape yet, as in LazyLinear; "
            "run a forward pass before returning the model"
        ) from None


def _entries(found: Any) -> Iterable[tuple[Any, ...]]:
    pairs = found.named_parameters() if hasattr(found, "named_parameters") else found
    entries = [tuple(entry) for entry in pairs]
    return [entry for entry in entries if not _is_frozen(entry[1])]


def _is_frozen(given: Any) -> bool:
    """Return whether it is a parameter without a gradient; any other tensor shows its shape only."""
    import torch

    return isinstance(given, torch.nn.Parameter) and not given.requires_grad


def _tensor(name: Any, given: Any, macs: int = 0) -> Tensor:
    shape = tuple(int(size) for size in getattr(given, "shape", given))
    if not isinstance(name, str) or min(shape, default=1) < 1 or int(macs) < 0:
        raise ValueError
    return Tensor(name, shape, int(macs))


def _spread(table: Table) -> Table:
    """Return a table with multiply-adds: where none are given, those of matrices, one for each element.

    For layers that use their weights many times, as convolutions do, that is only a guess of the layers' shares.
    """
    if any(tensor.macs for tensor in table.tensors):
        return table
    wide = [tensor for tensor in table.tensors if len(tensor.shape) > 1] or list(table.tensors)
    counted = {tensor.name for tensor in wide}
    return Table(
        table.model,
        tuple(Tensor(t.name, t.shape, prod(t.shape) if t.name in counted else 0) for t in table.tensors),
    )
