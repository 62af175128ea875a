"""A method's options as saved states have them, which know nothing of options that came later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...codecs.shared.signs import LARGE_STEP

#: Options that states of earlier versions do not know, and what these did.
_LATER: dict[str, tuple[Any, ...]] = {
    "merge": ("sampled",),
    "step_scale": (1.0,),
    "levels": (2, None),
    "owner_scale": ("own",),
    "across": (None,),
}
#: Those that came after the format: states leave them out where they do what was done before.
_UNSAID: dict[str, tuple[Any, ...]] = {
    "momentum_kind": ("local",),
    "positions": ("own",),
    "filter": (1.0,),
    "rounding": ("independent",),
    "mantissa": (0,),
    "feedback": ("none",),
    "beta": (None,),
    "reset_every": (None,),
    "residual_bits": (None,),
    "value_bits": (32,),
    "chunk": (0,),
    "residual_decay": (1.0,),
    "average": ("ranks",),
    "block": (1,),
    "residual_dtype": ("float32",),
    "full_precision_dtype": ("float32",),
    "error": (0.0,),
}
#: Options that depend on the number of ranks, where they are None, and what states have for any number.
_BY_WORLD = {"step_scale": LARGE_STEP}
#: Of options that another method had before, one that only the method has to which they came later.
_BESIDE = {"value_bits": "momentum", "residual_decay": "density"}


def known(config: dict[str, Any], saved: object) -> dict[str, Any]:
    """Return options as a state of an earlier version has them: without those that came later."""
    if not isinstance(saved, Mapping):
        return config
    config, later = _for_any_number(config), _LATER | _UNSAID
    old = {name: v for name, v in config.items() if name in saved or not _is_as_before(name, v, config, later)}
    old = {name: _known_in_words(value, "", _UNSAID) for name, value in old.items()}  # as in the saved ones
    return {name: _known_in_words(value, saved.get(name), later) for name, value in old.items()}


def _is_as_before(name: str, value: Any, config: Mapping[str, Any], later: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return whether an option came later, and does what was done before."""
    return value in later.get(name, ()) and _BESIDE.get(name, name) in config


def _known_in_words(value: Any, saved: object, later: Mapping[str, tuple[Any, ...]]) -> Any:
    """Do so where a method and its options are one text, as in `per_layer` and `by_step`."""
    if not isinstance(value, str) or not isinstance(saved, str):
        return value
    for name, did in later.items():
        for before in did if f"{name}=" not in saved and f" {_BESIDE.get(name, name)}=" in value else ():
            value = re.sub(rf" {name}={re.escape(repr(before))}(?![\w.])", "", value)
    return value


def said(config: dict[str, Any]) -> dict[str, Any]:
    """Return options as states have them."""
    config = _for_any_number(config)
    told = {name: value for name, value in config.items() if not _is_as_before(name, value, config, _UNSAID)}
    return {name: _known_in_words(value, "", _UNSAID) for name, value in told.items()}


def _for_any_number(config: dict[str, Any]) -> dict[str, Any]:
    """Return options that depend on the number of ranks as states have them, which resume with any."""
    found = {name: _BY_WORLD.get(name) if value is None else value for name, value in config.items()}
    for option, number in _BY_WORLD.items():
        now, then = f" {option}=None", f" {option}={number}"
        found = {name: v.replace(now, then) if isinstance(v, str) else v for name, v in found.items()}
    return found
