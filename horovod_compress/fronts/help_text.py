"""What ``help()`` shows of a method: generated from its class, so that options and defaults are those in force."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from typing import Any

from ..codecs.base import Codec
from ..options import Options

_WIDTH = 100
PROCESS_SET = "the ranks that take part, as given to the optimizer. Default: all."
_PARAMETERS = "as given to the optimizer, in forward order."


def of_method(kind: type[Codec], option: str = "process_set", said: str = PROCESS_SET) -> str:
    """Return the docstring of the factory of a method."""
    lead, own = _parts(kind)
    _, common = _parts(Options)
    source = f"Source: {kind.source}.\n" if kind.source else ""
    page = f"Documentation: docs/{kind.page}\n" if kind.page else ""
    return (
        f"{lead}\n\nSends: {kind.summary}.\n{source}{page}\nArgs:\n"
        f"{_entry('named_parameters', _PARAMETERS)}{_entries(kind, own)}"
        f"\nOptions of all methods:\n{_entries(Options, common)}{_entry(option, said)}"
    )


def signature(kind: type[Codec], ranks: object, option: str = "process_set") -> inspect.Signature:
    """Return the signature of the factory of a method, with every option and its default."""
    first = inspect.Parameter("named_parameters", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    fields = [*dataclasses.fields(kind), *dataclasses.fields(Options)]
    options = [inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default) for one in fields]
    last = inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=ranks)
    return inspect.Signature([first, *options, last])


def _parts(kind: type[Any]) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before its list of arguments, and what it says of each argument."""
    lead, _, listed = inspect.cleandoc(kind.__doc__ or "").partition("\nArgs:\n")
    found = re.split(r"^(\w+): ", textwrap.dedent(listed), flags=re.MULTILINE)[1:]
    return lead.strip(), {name: " ".join(text.split()) for name, text in zip(found[::2], found[1::2], strict=True)}


def _entries(kind: type[Any], said: dict[str, str]) -> str:
    return "".join(
        _entry(one.name, f"{said.get(one.name, '').rstrip('.')}. Default: {shown(one.default)}.")
        for one in dataclasses.fields(kind)
    )


def _entry(name: str, text: str) -> str:
    text = re.sub(r":class:`~?(?:\w+\.)*(\w+)`", r"\1", text)
    return textwrap.fill(f"{name}: {text}", _WIDTH, initial_indent="    ", subsequent_indent=" " * 8) + "\n"


def shown(value: object) -> str:
    """Return a default as it is written in a program."""
    return f'"{value}"' if isinstance(value, str) else repr(value)
