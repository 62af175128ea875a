"""The functions that make compressions: one for each method, with its own signature and help.

Both are generated from the method's class, so that options and defaults are those in force. What type checkers see of
them is in ``factory_types.pyi`` beside each front, which tools/make_types.py writes.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any, TypeVar, cast

from torch import nn

from ..codecs import registry
from ..codecs.base import Codec
from ..codecs.masked import Masked
from ..codecs.registry import built_in
from ..engine.job import Job
from ..engine.methods import Methods, per_layer
from ..errors import ConfigError
from ..options import PRESETS, Options
from .startup import before_handshake, check_alone

F = TypeVar("F", bound=Callable[..., Any])
NamedParameters = Iterable[tuple[str, nn.Parameter]]

_WANTED = {
    "create": '"marsit", model.named_parameters()',
    "per_layer": '{"*": "marsit"}, model.named_parameters()',
}


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


@dataclass(frozen=True)
class RanksOption:
    """The option that says which ranks take part.

    Attributes:
        said: what ``help()`` shows of it.
        job: makes the job of its value.
    """

    name: str
    default: object
    said: str
    job: Callable[[Any], Job]

    def job_of(self, options: dict[str, Any], check: Callable[[Mapping[str, Any]], object]) -> Job:
        """Take the option out of those given, and return its job.

        Args:
            check: called with the other options where there is no job, as at a prompt: an error in them comes first.
        """
        chosen = options.pop(self.name, self.default)
        try:
            return self.job(chosen)
        except ConfigError:
            check(options)
            raise


def add_factories(kind: Any, ranks: RanksOption, refused: Iterable[str]) -> None:
    """Give a class of compressions static methods that make them: one for each method, ``create`` and ``per_layer``.

    Args:
        kind: the class.
        refused: methods of a compression that the functions themselves are to refuse, by name.
    """
    made = [_create(kind, ranks), _per_layer(kind, ranks)]
    kind.create = staticmethod(made[0])  # the others call it
    made += [_factory(kind, name, ranks) for name in [*built_in(), *PRESETS]]
    for function in made:
        function.__qualname__ = f"{kind.__name__}.{function.__name__}"
        function.__module__ = kind.__module__
        setattr(kind, function.__name__, staticmethod(function))
        _refuse_calls(function, refused)


def _create(kind: Any, ranks: RanksOption) -> Callable[..., Any]:
    def create(method: str | Codec | Masked, named_parameters: NamedParameters, **options: Any) -> Any:
        job = ranks.job_of(options, lambda others: check_alone(method, named_parameters, others))
        return kind(method, named_parameters, options, job)

    create.__doc__ = f"""Create a compression by the name of its method.

        Args:
            method: one of :func:`available`, or what :func:`method`, :func:`masked` or :func:`by_step` returns.
            named_parameters: of the model, in forward order; parameters that need no gradient are skipped.
            options: those of the method and those of all methods; ``{ranks.name}``: {ranks.said}
        """
    return create


def _per_layer(kind: Any, ranks: RanksOption) -> Callable[..., Any]:
    def make(methods: Mapping[str, str | Codec | Masked], named_parameters: NamedParameters, **options: Any) -> Any:
        job = ranks.job_of(options, lambda others: check_alone(per_layer(methods), named_parameters, others))
        with before_handshake(job):
            found: Methods = per_layer(methods)
        return kind(found, named_parameters, options, job)

    make.__name__ = "per_layer"
    make.__doc__ = """Create a compression with different methods for different layers.

            hvc.Compression.per_layer({"embed*": hvc.method("topk", density=0.01), "*.bias": "none", "*": "marsit"},
                                      model.named_parameters())

        Args:
            methods: by pattern, names of methods or what :func:`method`, :func:`masked` or :func:`by_step` returns. A
                pattern has to match the whole name of a parameter; * stands for anything, ? for one character, [ab] for
                one of these. The first match counts, and every parameter needs one.
            named_parameters: as for :meth:`create`.
            options: those of all methods; give a method's own options to :func:`method`.
        """
    return make


def _factory(kind: Any, method: str, ranks: RanksOption) -> Callable[..., Any]:
    codec = registry.codec_class(method)

    def make(named_parameters: NamedParameters, **options: Any) -> Any:
        return kind.create(method, named_parameters, **options)

    make.__name__ = method
    make.__doc__ = of_method(codec, ranks.name, ranks.said, method)
    make.__signature__ = signature(codec, ranks.default, ranks.name, method)  # type: ignore[attr-defined]
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


# ---- what help() shows ----

_WIDTH = 100
PROCESS_SET = "the ranks that take part, as given to the optimizer. Default: all."
_PARAMETERS = "as given to the optimizer, in forward order."


def of_method(kind: type[Codec], option: str = "process_set", said: str = PROCESS_SET, name: str = "") -> str:
    """Return the docstring of the factory of a method, or of a preset of that name."""
    lead, own = _parts(kind)
    given = registry.preset_options(name)
    if name in PRESETS:
        options = " with ".join(filter(None, [kind.name, ", ".join(f"{o}={shown(v)}" for o, v in given.items())]))
        lead = f"A preset: {options}.\n\n{lead}"
    _, common = _parts(Options)
    source = f"Source: {kind.source}.\n" if kind.source else ""
    page = f"Documentation: docs/{kind.page}\n" if kind.page else ""
    return (
        f"{lead}\n\nSends: {kind.summary}.\n{source}{page}\nArgs:\n"
        f"{_entry('named_parameters', _PARAMETERS)}{_entries(kind, own, given)}"
        f"\nOptions of all methods:\n{_entries(Options, common)}{_entry(option, said)}"
    )


def signature(kind: type[Codec], ranks: object, option: str = "process_set", name: str = "") -> inspect.Signature:
    """Return the signature of the factory of a method, or of a preset of that name, with all options and defaults."""
    given = registry.preset_options(name)
    first = inspect.Parameter("named_parameters", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    fields = [*dataclasses.fields(kind), *dataclasses.fields(Options)]
    defaults = {one.name: given.get(one.name, one.default) for one in fields}
    options = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=value) for n, value in defaults.items()]
    last = inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=ranks)
    return inspect.Signature([first, *options, last])


def _parts(kind: type[Any]) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before its list of arguments, and what it says of each argument."""
    lead, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")
    found = re.split(r"^(\w+): ", textwrap.dedent(listed), flags=re.MULTILINE)[1:]
    return lead.strip(), {name: " ".join(text.split()) for name, text in zip(found[::2], found[1::2], strict=True)}


def _entries(kind: type[Any], said: dict[str, str], given: Mapping[str, Any] = MappingProxyType({})) -> str:
    return "".join(
        _entry(one.name, f"{said.get(one.name, '').rstrip('.')}. Default: {shown(given.get(one.name, one.default))}.")
        for one in dataclasses.fields(kind)
    )


def _entry(name: str, text: str) -> str:
    text = re.sub(r":class:`~?(?:\w+\.)*(\w+)`", r"\1", text)
    return textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent="    ", subsequent_indent=" " * 8) + "\n"


def shown(value: object) -> str:
    """Return a default as it is written in a program."""
    return f'"{value}"' if isinstance(value, str) else repr(value)
