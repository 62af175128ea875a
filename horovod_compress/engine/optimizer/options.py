"""The options of an optimizer, in words: ranks whose optimizers differ would train different models."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor

OF_OPTIMIZER = "the optimizer's "
_HOW = {"foreach", "fused", "capturable", "differentiable"}


def options_of(optimizer: Any) -> dict[str, str]:
    """Return an optimizer's class and the options of its parameter groups, by name, for a comparison across ranks.

    Only what some optimizer of torch's knows too is compared: what a program adds to a group is its own.
    """
    found = {f"{OF_OPTIMIZER}class": type(optimizer).__name__}
    groups = optimizer.param_groups
    for number, group in enumerate(groups):
        where = f" of parameter group {number}" if len(groups) > 1 else ""
        for name in sorted(_known() & set(group)):
            if (text := _in_words(group[name])) is not None:
                found[f"{OF_OPTIMIZER}{name}{where}"] = text
    return found


def _in_words(value: Any) -> str | None:
    """Return a plain value in words; None for what is none."""
    if isinstance(value, Tensor):
        return repr(float(value)) if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        parts = [_in_words(part) for part in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else None


@cache
def _known() -> frozenset[str]:
    """Return the options of torch's optimizers, but for those that only say how they compute."""
    kinds = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]
    names = {name for kind in kinds for name in inspect.signature(kind).parameters}
    return frozenset(names - {"params", "defaults", "args", "kwargs"} - _HOW)
