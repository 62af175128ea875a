"""The functions that make compressions: one for each method, with its own signature and help."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, ClassVar, Protocol, TypeVar, cast

from torch import nn

from ...codecs import registry
from ...codecs.registry import available
from ...errors import ConfigError
from .. import help_text

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])
NamedParameters = Iterable[tuple[str, nn.Parameter]]

_WANTED = {
    "create": '"marsit", model.named_parameters()',
    "per_layer": '{"*": "marsit"}, model.named_parameters()',
}


class Factory(Protocol):
    """How type checkers see what :func:`add_factories` adds: called, it makes an object of the class it is found in."""

    def __get__(self, instance: object, owner: type[C]) -> Callable[..., C]: ...


class Factories:
    """The methods, for editors to complete; :func:`add_factories` adds those that are registered later."""

    none: ClassVar[Factory]
    dgc: ClassVar[Factory]
    fp16: ClassVar[Factory]
    bf16: ClassVar[Factory]
    ef_signsgd: ClassVar[Factory]
    global_qsgd: ClassVar[Factory]
    marsit: ClassVar[Factory]
    natural: ClassVar[Factory]
    qsgd: ClassVar[Factory]
    randomk: ClassVar[Factory]
    onebit: ClassVar[Factory]
    onebit_adam: ClassVar[Factory]
    powersgd: ClassVar[Factory]
    signsgd: ClassVar[Factory]
    signum: ClassVar[Factory]
    sketch_fusion: ClassVar[Factory]
    sparse_binary: ClassVar[Factory]
    stc: ClassVar[Factory]
    terngrad: ClassVar[Factory]
    topk: ClassVar[Factory]


class _OfAnObject:
    """A method that says so where it is called on the class, as a framework does when it is given that."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        return _refuse_class if instance is None else MethodType(self._function, instance)


def of_an_object(function: F) -> F:
    """Let a method refuse to be called on its class."""
    return cast(F, _OfAnObject(function))


def _refuse_class(*given: object) -> Any:
    raise ConfigError(
        "hvc.Compression is a class: write compression = hvc.Compression.marsit(model.named_parameters()), or another "
        "method, and give that to the optimizer"
    )


def add_factories(kind: Any, ranks: tuple[str, object, str], refused: Iterable[str]) -> None:
    """Give a class of compressions, which has ``create`` and ``per_layer``, a static method for each method.

    Args:
        kind: the class.
        ranks: the option that says which ranks take part, its default, and what ``help()`` shows of it.
        refused: methods of a compression that the functions themselves are to refuse, by name.
    """
    for name in available():
        setattr(kind, name, staticmethod(_factory(kind, name, ranks)))
    for name in (*available(), "create", "per_layer"):
        _refuse_calls(getattr(kind, name), refused)


def _factory(kind: Any, method: str, ranks: tuple[str, object, str]) -> Callable[..., Any]:
    codec = registry.codec_class(method)

    def make(named_parameters: NamedParameters, **options: Any) -> Any:
        return kind.create(method, named_parameters, **options)

    make.__name__, make.__qualname__ = method, f"{kind.__name__}.{method}"
    option, default, said = ranks
    make.__doc__ = help_text.of_method(codec, option, said)
    make.__signature__ = help_text.signature(codec, default, option)  # type: ignore[attr-defined]
    return make


def _refuse_calls(function: Callable[..., Any], refused: Iterable[str]) -> None:
    """Let a factory that a framework is given in place of a compression say that it has to be called."""
    name = f"hvc.Compression.{function.__name__}"

    def refuse(*given: object, **options: object) -> Any:
        raise ConfigError(
            f"{name} is not a compression but makes one: write "
            f"compression = {name}({_WANTED.get(function.__name__, 'model.named_parameters()')}), "
            "and give that to the optimizer"
        )

    for attribute in refused:
        setattr(function, attribute, refuse)
