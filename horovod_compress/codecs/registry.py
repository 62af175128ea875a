"""The codecs by name; the package fills it when it is imported."""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from ..errors import ConfigError
from ..known import MethodName
from ..options import Options
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
        raise ConfigError(f"unknown method {name!r:.200}{meant(name, _CODECS)}; choose one of: {', '.join(_CODECS)}")
    return _CODECS[name]


def meant(given: object, known: Iterable[str]) -> str:
    """Return a question whether a name was meant that is, or begins with, almost what was given."""
    name, full = str(given).lower().replace("-", "_"), list(known)
    beginnings = {one[: len(name)]: one for one in reversed(full)} if len(name) > 2 else {}
    whole, begun = (difflib.get_close_matches(name, choices, 1) for choices in (full, beginnings))
    near = whole or [beginnings[one] for one in begun]
    return f" (did you mean {near[0]!r}?)" if near else ""


def option_names(name: str) -> list[str]:
    """Return the options of a method, without those common to all methods."""
    return list(inspect.signature(codec_class(name)).parameters)


def own_options(name: str) -> str:
    """Return in words which options a method has beside those common to all."""
    own = option_names(name)
    return f"its own options are {', '.join(own)}" if own else "it has no specific options"


def create(name: str, **options: Any) -> Codec:
    """Return a codec with options.

    Raises:
        ConfigError: the name or an option is unknown, or a value is out of range.
    """
    codec = codec_class(name)
    known = option_names(name)
    if unknown := sorted(set(options) - set(known)):
        common = f"; {unknown[0]} is common to all methods: give it to the compression as a whole"
        is_common = unknown[0] in Options.names()
        question = "" if is_common else meant(unknown[0], [*known, *Options.names()])
        raise ConfigError(
            f"{name} has no option {unknown[0]!r}{question}; {own_options(name)}{common if is_common else ''}"
        )
    return codec(**options)


def import_all(package: str, folders: Iterable[str]) -> None:
    """Import every codec of a package, each of which registers itself."""
    for module in sorted(module.name for module in pkgutil.iter_modules(folders)):
        if module not in _NO_CODECS:
            importlib.import_module(f"{package}.{module}")
