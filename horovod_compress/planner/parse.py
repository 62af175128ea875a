"""What a user writes on the command line, as numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..known import OPTIONS
from ..options import check_known

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST_BITS, _MOST_SECONDS = 1e15, 1000  # beyond them predictions say nothing
MOST_RANKS = 1 << 16  # what a frame's header can name


def rate(text: str) -> float:
    """Return the bytes per second of a link's rate, such as ``1gbit`` or ``200mbit``.

    Raises:
        ConfigError: it is no such rate.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(kbit|mbit|gbit)(?:/s)?", text.strip().lower())
    bits = float(found[1]) * _RATES[found[2]] if found else 0.0
    if not _RATES["kbit"] <= bits <= _MOST_BITS:
        raise ConfigError(
            "a rate is a number and kbit, mbit or gbit (per second), such as 1gbit, from 1kbit to 1000000gbit; "
            f"got {text!r}"
        )
    return bits / 8


def seconds(text: str) -> float:
    """Return the seconds of ``50us``, ``0.1ms`` or ``1s``.

    Raises:
        ConfigError: it is no such time.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip().lower())
    value = float(found[1]) * _TIMES[found[2]] if found else -1.0
    if not 0 <= value <= _MOST_SECONDS:
        raise ConfigError(
            f"a latency is a number and us, ms or s, such as 50us, at most {_MOST_SECONDS}s; got {text!r}"
        )
    return value


def ranks(text: str) -> list[int]:
    """Return numbers of ranks, separated by commas, in rising order.

    Raises:
        ConfigError: one of them is no number from 2 to 65536.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or any(not word.isdecimal() or not 2 <= int(word) <= MOST_RANKS for word in words):
        raise ConfigError(f"--ranks takes numbers from 2 to {MOST_RANKS}, separated by commas, got {text!r}")
    return sorted({int(word) for word in words})


def names(text: str) -> list[str]:
    """Return the methods' names of ``all``, or of names separated by commas.

    Raises:
        ConfigError: there are none, or one is unknown.
    """
    found = list(OPTIONS) if text == "all" else [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError(f"--method takes a method's name, several separated by commas, or all; got {text!r}")
    for name in found:
        check_known(name, {})
    return list(dict.fromkeys(found))


def options(words: Sequence[str], given_to: Sequence[str]) -> dict[str, Any]:
    """Return the options of one method, as far as they can be checked without it.

    Args:
        words: ``name=value`` each.
        given_to: the names of the methods, of which there should be one.

    Raises:
        ConfigError: one is unknown, or options are given for several methods.
    """
    if words and len(given_to) > 1:
        raise ConfigError(f"--option needs exactly one method, but --method names {len(given_to)}")
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (equals and name.isidentifier() and value):
            raise ConfigError(f"--option takes name=value, such as density=0.01, got {word!r}")
        if name in found:
            raise ConfigError(f"--option {name} is given twice; give it once")
        found[name] = value_of(value)
    check_known(given_to[0], found)
    return found


def value_of(text: str) -> Any:
    """Return what a text says in Python; the text itself if that is nothing."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):  # the last ones of deep brackets
        return text
