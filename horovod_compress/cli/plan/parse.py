"""What a user writes on the command line: read as numbers, and refused where it cannot be, without torch."""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...known import OPTIONS
from ...options import FOR_UPDATES, PRESETS, check_exchange, check_known

_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_MOST_BITS, _MOST_SECONDS = 1e15, 1000  # beyond them predictions say nothing
MOST_RANKS = 1 << 16  # what a frame's header can name
_SUFFIXES = (".png", ".svg")
_LEAST, _MOST_MILLISECONDS, _MOST_CORES = 1e-3, 1_000_000_000, 1_000_000


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
        ConfigError: there are none, or one is unknown, or does not exchange gradients in every step.
    """
    found = list(OPTIONS) if text == "all" else [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError(f"--method takes a method's name, several separated by commas, or all; got {text!r}")
    named: dict[tuple[str, str], str] = {}
    for name in found:
        check_known(name, {})
        if name in FOR_UPDATES:
            raise ConfigError(f"steps that exchange gradients are predicted, and {FOR_UPDATES[name]}")
        named.setdefault(_meaning(name), name)
    return [*named.values()]


def _meaning(name: str) -> tuple[str, str]:
    """Return a method and its options in words: a preset may be another name for a method."""
    preset = PRESETS.get(name)
    return (preset.method, str(dict(preset.options))) if preset else (name, "{}")


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


# ---- all of them ------------------------------------------------------------------------------


def checked(arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any], list[int]]:
    """Return the methods, the options of the one that has some, and the numbers of ranks.

    Raises:
        ConfigError: a number or a file cannot be, or options do not go together.
    """
    methods = names(arguments.method)
    given = options(arguments.option, methods)
    worlds = ranks(arguments.ranks)
    check_exchange(arguments.exchange)
    rate(arguments.rate)
    seconds(arguments.latency)
    for option, value, most in (
        ("--compute-ms", arguments.compute_ms, _MOST_MILLISECONDS),
        ("--cores", arguments.cores, _MOST_CORES),
    ):
        if not _LEAST <= value <= most:
            raise ConfigError(f"{option} should be a number from {_LEAST:g} to {most:,}, got {value:g}")
    if arguments.repeat < 2:
        raise ConfigError(f"--repeat should be at least 2, got {arguments.repeat}")
    _check_hosts(arguments)
    if arguments.save is not None:
        _check_file(arguments.save)
    if arguments.plot is not None:
        _check_plot(arguments.plot)
    if arguments.measure:
        if len(methods) > 1:
            raise ConfigError("--measure takes one method")
        if arguments.plot or arguments.per_host:
            option = "--plot" if arguments.plot else "--per-host"
            raise ConfigError(f"{option} applies to predictions only; leave it out with --measure")
    elif arguments.save and (len(methods) > 1 or len(worlds) > 1 or arguments.per_host):
        raise ConfigError("--save needs exactly one method and one number of ranks, and no --per-host")
    return methods, given, worlds


def _check_hosts(arguments: argparse.Namespace) -> None:
    if arguments.local_rate is not None:
        rate(arguments.local_rate)
        if arguments.per_host is None:
            raise ConfigError(
                "--local-rate is the rate of copies in a host's memory; give --per-host N too, or leave it out"
            )
    if arguments.exchange == "hierarchical":
        raise ConfigError("--exchange hierarchical is predicted by --per-host N; leave --exchange out")
    if arguments.per_host is None:
        return
    if not 2 <= arguments.per_host <= MOST_RANKS // 2:
        raise ConfigError(f"--per-host should be from 2 to {MOST_RANKS // 2}, got {arguments.per_host}")
    if all(number % arguments.per_host or number == arguments.per_host for number in ranks(arguments.ranks)):
        raise ConfigError(
            f"--per-host {arguments.per_host} needs --ranks with several full hosts, such as {2 * arguments.per_host}; "
            f"got {arguments.ranks}"
        )


def _check_plot(target: str) -> None:
    path = Path(target)
    if not target or (path.suffix and path.suffix not in _SUFFIXES and not path.is_dir()):
        raise ConfigError(f"--plot takes a folder, or a file that ends in .png or .svg, got {target!r}")
    if not path.suffix and path.exists() and not path.is_dir():
        raise ConfigError(f"--plot {target} is a file; give a folder, or a file that ends in .png or .svg")
    _check_writable("--plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'horovod-compress[plot]'") from None


def _check_file(target: str) -> None:
    """Refuse a file that could not be written in the end."""
    path = Path(target)
    if not target or path.is_dir():
        raise ConfigError(f"--save takes a file to write, got {f'the folder {target}' if target else 'no name'}")
    _check_writable("--save", path)


def _check_writable(option: str, path: Path) -> None:
    """Refuse what is neither there nor in a folder that is, which may be a slip, and what nobody may write."""
    if not path.exists() and not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: No such folder: {path.parent}; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: no permission to write there")
