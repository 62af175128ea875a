"""The codecs by name: those of this package, which registers them when it is imported, and those of others.

Another package offers a codec by an entry point of the group ``horovod_compress.methods``, whose name is the method's
and whose object is the class. It is loaded when the method is asked for by its name, and not before.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from functools import cache
from typing import Any, TypeVar, cast

from ..errors import ConfigError
from ..known import MethodName
from ..options import PRESETS, check_own, installed, package_of, plain, unknown_method
from .base import Codec

_CODECS: dict[str, type[Codec]] = {}
_NO_CODECS = {"base", "by_step", "masked", "registry", "shared", "work"}
_PACKAGE = __name__.rpartition(".")[0]

C = TypeVar("C", bound=type[Codec])


def register(codec: C) -> C:
    """Class decorator that makes a codec available under its name."""
    if codec.name in _CODECS:
        raise TypeError(f"two codecs are named {codec.name!r}")
    if codec.name in PRESETS:
        raise TypeError(f"{codec.name!r} is the name of a preset")
    _CODECS[codec.name] = codec
    return codec


def built_in() -> list[MethodName]:
    """Return the names of this package's own methods: plain numbers first, then by the alphabet."""
    found = [codec for codec in _CODECS.values() if codec.__module__.startswith(f"{_PACKAGE}.")]
    found.sort(key=lambda codec: "" if codec.__module__ == f"{_PACKAGE}.dense" else codec.name)
    return cast(list[MethodName], [codec.name for codec in found])  # tools/make_types.py writes their names


def methods() -> list[MethodName]:
    """Return the names of all methods, those of other installed packages last."""
    return cast(list[MethodName], list(dict.fromkeys([*built_in(), *_CODECS, *installed()])))


def available() -> list[MethodName]:
    """Return the names of all methods, and of the presets, which stand for a method with options."""
    return [*methods(), *cast(list[MethodName], list(PRESETS))]


def codec_class(name: str) -> type[Codec]:
    """Return the codec of a name; that of its method for a preset.

    Raises:
        ConfigError: there is none, or the package that offers it has none that can be used.
    """
    if isinstance(name, str):
        name = PRESETS[name].method if name in PRESETS else name
        if name in _CODECS:
            return _CODECS[name]
        if name in installed():
            return _loaded(name)
    raise unknown_method(name, available())


@cache
def _loaded(name: str) -> type[Codec]:
    """Return the codec that another package offers under a name."""
    point, *others = installed()[name]
    if others:
        packages = " and ".join(map(package_of, [point, *others]))
        raise ConfigError(f"the method {name!r} is offered by {packages}; uninstall all but one of them")
    start = f"the method {name!r} of the package {package_of(point)} cannot be used: "
    end = "; update that package, or uninstall it"
    try:
        found = point.load()
    except Exception as error:  # it is another package's, and may raise anything
        raise ConfigError(f"{start}loading {point.value} raised {type(error).__name__}: {error}{end}") from error
    if not (isinstance(found, type) and issubclass(found, Codec)):
        raise ConfigError(f"{start}{point.value} should be a class derived from {Codec.__module__}.Codec{end}")
    if getattr(found, "name", None) != name:
        raise ConfigError(f"{start}{point.value} has the name {getattr(found, 'name', None)!r}{end}")
    return found


def option_names(name: str) -> list[str]:
    """Return the options of a method, without those common to all methods."""
    return list(inspect.signature(codec_class(name)).parameters)


def create(name: str, **options: Any) -> Codec:
    """Return a codec with options, which come before those of a preset.

    Raises:
        ConfigError: the name or an option is unknown, or a value is out of range.
    """
    codec = codec_class(name)
    check_own(name, options, option_names(name))
    return codec(**(preset_options(name) | {option: plain(value) for option, value in options.items()}))


def preset_options(name: str) -> dict[str, Any]:
    """Return the options that a preset stands for; none of a method."""
    return dict(PRESETS[name].options) if name in PRESETS else {}


def import_all(package: str, folders: Iterable[str]) -> None:
    """Import every codec of a package, each of which registers itself."""
    for module in sorted(module.name for module in pkgutil.iter_modules(folders)):
        if module not in _NO_CODECS:
            importlib.import_module(f"{package}.{module}")
