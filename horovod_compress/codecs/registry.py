"""The codecs by name; the package fills it when it is imported."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from ..known import MethodName
from ..options import check_own, unknown_method
from .base import Codec

_CODECS: dict[str, type[Codec]] = {}
_NO_CODECS = {"base", "by_step", "carry", "feedback", "law", "layout", "masked", "registry", "shared", "work"}

C = TypeVar("C", bound=type[Codec])


def register(codec: C) -> C:
    """Class decorator that makes a codec available under its name."""
    if codec.name in _CODECS:
        raise TypeError(f"two codecs are named {codec.name!r}")
    _CODECS[codec.name] = codec
    return codec


def available() -> list[MethodName]:
    """Return the names of all methods."""
    return cast(list[MethodName], list(_CODECS))  # tools/make_types.py writes their names


def codec_class(name: str) -> type[Codec]:
    """Return the codec of a name.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(name, str) or name not in _CODECS:
        raise unknown_method(name, _CODECS)
    return _CODECS[name]


def option_names(name: str) -> list[str]:
    """Return the options of a method, without those common to all methods."""
    return list(inspect.signature(codec_class(name)).parameters)


def create(name: str, **options: Any) -> Codec:
    """Return a codec with options.

    Raises:
        ConfigError: the name or an option is unknown, or a value is out of range.
    """
    codec = codec_class(name)
    check_own(name, options, option_names(name))
    return codec(**options)


def import_all(package: str, folders: Iterable[str]) -> None:
    """Import every codec of a package, each of which registers itself."""
    for module in sorted(module.name for module in pkgutil.iter_modules(folders)):
        if module not in _NO_CODECS:
            importlib.import_module(f"{package}.{module}")
