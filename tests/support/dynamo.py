"""Leaves torch's compiler out of processes that compile nothing.

The first optimizer of a process imports it, to tell it what not to compile: seconds of a core, for each worker of the
tests and each rank of each job. A stand-in answers that, and becomes the real module as soon as anything else is asked
of it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


class Later(ModuleType):
    """The module, until it is needed."""

    @staticmethod
    def disable(function: Any = None, *_: Any, **__: Any) -> Any:
        """Return a function as it is, or what does so."""
        return (lambda given: given) if function is None else function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        # Imports of submodules look for __path__ here; whoever looks through all modules, for the likes of __file__.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
            del torch._dynamo
        return getattr(importlib.import_module(NAME), name)


def leave_out() -> None:
    """Put the stand-in where the compiler has not been imported yet."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = Later(NAME)  # type: ignore[assignment]
