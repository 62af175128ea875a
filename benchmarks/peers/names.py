"""How contestants are named, and whether a name can be meant: known without Horovod, before a job starts."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from benchmarks.bandwidth import UNDER_DDP, UNWRAPPED, without_front
from horovod_compress.codecs.base import variants_of
from horovod_compress.codecs.registry import available
from horovod_compress.engine.methods import parse as parse_options
from horovod_compress.errors import ConfigError
from horovod_compress.exchange.choose import Choose
from horovod_compress.options import EXCHANGES
from horovod_compress.schedule.by_name import make_plan
from horovod_compress.schedule.plan import TensorSpec

STOCK = ("horovod fp32", "horovod fp16", "headroom")
DDP = ("ddp fp32", "ddp fp16", "ddp powersgd r1", "ddp powersgd r4")
METHODS = available()
#: Of DistributedDataParallel itself, which a name that begins so may set among the options of the method.
DDP_OPTIONS = ("bucket_cap_mb",)


class PeerError(RuntimeError):
    """A contestant cannot be had; the text says which, why and what to do."""


def parse(text: str, others: Iterable[str] = (*STOCK, *DDP)) -> tuple[str, dict[str, Any]]:
    """Return method and options of ``METHOD [ring|fold|auto] [key=value ...]``.

    Values are read as Python, and as text where they are none: ``seed=3``, ``schedule=size:4MB``.

    Raises:
        PeerError: the method is not known, or a word is neither an exchange nor an option.
    """
    method, *words = text.split() or [""]
    if method not in METHODS:
        raise PeerError(
            f"unknown contestant {text!r}; choose one of {', '.join(others)}, or a method of this package with "
            f"options, under Horovod, under DDP ({UNDER_DDP}marsit) or with a plain module ({UNWRAPPED}marsit): "
            f"{', '.join(METHODS)}"
        )
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word in EXCHANGES:
            key, value = "exchange", word
        elif not (equals and key.isidentifier() and value):
            raise PeerError(f"contestant {text!r}: {word!r} is neither {', '.join(EXCHANGES)} nor key=value")
        if key in options:
            raise PeerError(f"contestant {text!r}: {key} is given twice")
        options[key] = _value(value)
    return method, options


def divided(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of DistributedDataParallel, and those of the method."""
    theirs = {key: value for key, value in options.items() if key in DDP_OPTIONS}
    return theirs, {key: value for key, value in options.items() if key not in DDP_OPTIONS}


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def check(names: Iterable[str], stock: Iterable[str] = (*STOCK, *DDP)) -> None:
    """Refuse names that no job could take.

    Args:
        stock: names of others that are known here.

    Raises:
        PeerError: a name or an option is unknown, a value out of range, or a name comes twice.
    """
    names, known = list(names), list(stock)
    for name in names:
        if names.count(name) > 1:
            raise PeerError(f"two contestants are named {name!r}; names are unique in a run")
        if name in known:
            continue
        # Only a benchmark that has DDP itself can run methods in its process group.
        has_ddp = DDP[0] in known
        method, options = parse(without_front(name) if has_ddp else name, known)
        if has_ddp and name.startswith(UNDER_DDP):
            _, options = divided(options)
        try:
            _check_options(method, options)
        except ConfigError as error:
            raise PeerError(f"contestant {name!r}: {error}") from None


def _check_options(method: str, given: dict[str, Any]) -> None:
    """Refuse what every job would refuse, whatever the model and the number of ranks."""
    methods, options = parse_options(method, given)
    make_plan(options.schedule, [TensorSpec("weight", (1024, 1024), "float32")], options.min_elements)
    for variant in variants_of(methods.codecs[1]):
        Choose(options.exchange)(variant, 0, 2)
