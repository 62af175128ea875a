"""List the methods: what they send, keep and promise.

    hvd-compress list
    hvd-compress list --json
    hvd-compress list --markdown      the table of docs/methods.md

Bits are those of one rank's payload for one element of a large float32 tensor, without headers, with
the default options; below each method, choices with which something of this changes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..options import PRESETS
from .common import refuse, table

if TYPE_CHECKING:
    from horovod_compress.codecs.base import Codec

_ELEMENTS, _RANKS = 1 << 22, 4
_COLUMNS = ("method", "payloads", "exchange", "bits", "kept bytes", "unbiased", "conserves", "zeros")
_WIDTH = 100
_MARKDOWN_COLUMNS = (
    "method",
    "sends",
    "bits per element",
    "wire id, version",
    "exchange",
    "options and defaults",
    "source, page",
)
_NOTES = """\
payloads:   how those of several ranks combine, which decides what exchanges fit
exchange:   those that fit; any is ring, fold or torus
bits:       per element and rank; with gathered payloads (*) the most, and a rank sends M-1 of them
kept bytes: per parameter, from step to step, in addition to the optimizer's
unbiased:   the result is the mean over ranks on average
conserves:  what is not sent now stays in the residuals; nothing is lost
zeros:      where the gradient is exactly 0 on every rank in every step, so is the result: always,
            with Adam and AdamW (a second moment that is held), or with hvc.masked() only"""
_PRESETS = "Presets, which stand for a method with options (docs/systems.md):"
_BOUNDS = """\
Error bound of the result against the mean of gradient + residual (M: ranks; d: elements;
k: elements sent; own: of each rank's part, whose error stays in its residual):"""
_MORE = "hvd-compress list --json has the options; docs/ has a page for each method."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the choice of the form."""
    parser.add_argument("--markdown", action="store_true", help="print the methods and their options as Markdown")


def run(arguments: argparse.Namespace) -> int:
    """Print the table and return 0."""
    if arguments.markdown:
        if arguments.json:
            return refuse("list", "give --json or --markdown, not both")
        print(markdown())
        return 0
    found = rows()
    if arguments.json:
        print(json.dumps({"methods": found, "presets": presets(), "elements": _ELEMENTS, "ranks": _RANKS}))
    else:
        print(text(found))
    return 0


def rows() -> list[dict[str, Any]]:
    """Return one entry per method, with its defaults, and per choice that changes its law, payload or memory."""
    from horovod_compress.codecs import registry
    from horovod_compress.errors import ConfigError

    found = []
    for name in registry.methods():
        try:
            found += rows_of(registry.codec_class(name))
        except ConfigError as error:  # it is another package's: the others are as they were
            print(f"hvd-compress: {error}", file=sys.stderr)
        except Exception as error:
            if name in registry.built_in():
                raise
            print(f"hvd-compress: the method {name!r} raised {type(error).__name__}: {error}", file=sys.stderr)
    return found


def presets() -> dict[str, dict[str, Any]]:
    """Return what each preset stands for, by name."""
    return {
        name: {"method": preset.method, "options": dict(preset.options), "updates": dict(preset.updates)}
        for name, preset in PRESETS.items()
    }


def rows_of(kind: Any) -> list[dict[str, Any]]:
    """Return the entries of one method."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for options in choices(kind):
        one = entry(kind, options)
        known = (repr(one["payloads"]), one["bound"], one["kept_bytes"], one["zeros"], f"{one['bits']:.3g}")
        found.setdefault(known, one)
    return list(found.values())


def choices(kind: Any) -> Iterator[dict[str, Any]]:
    """Yield no options, then each value of each option whose values can be counted, if it may be chosen alone.

    Then those of presets that exchange gradients, which may be several.
    """
    from horovod_compress.errors import ConfigError
    from horovod_compress.known import OPTIONS

    yield {}
    for name, values in OPTIONS.get(kind.name, {}).items():
        for value in values or ():
            with contextlib.suppress(ConfigError):
                kind(**{name: value})
                yield {name: value}
    yield from (dict(p.options) for p in PRESETS.values() if p.method == kind.name and not p.updates)


def entry(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return one row of the table: a method with the options given."""
    from horovod_compress.cli.plan.network import nbytes
    from horovod_compress.codecs.base import Algebra, variants_of
    from horovod_compress.exchange.choose import fitting
    from horovod_compress.schedule.plan import Bucket, TensorSpec

    codec = kind(**options)
    bucket = Bucket(0, (TensorSpec("weight", (_ELEMENTS // 1024, 1024), "float32"),))
    form, law = variants_of(codec)[0], codec.properties().law
    layout, whole = form.layout(bucket, 1), codec.layout(bucket, 1)
    passed_on = layout.regions | layout.results  # as much is sent of the one as of the other
    size = (nbytes(layout.regions) + nbytes(passed_on)) / 2 + sum(map(nbytes, layout.preludes))
    kept = sum(dtype.itemsize for dtype in whole.state.values()) + nbytes(whole.tables) / _ELEMENTS
    return {
        "method": codec.name,
        "options": options,
        "summary": kind.summary,
        "payloads": form.algebra.name,
        "collectives": fitting(form.algebra),
        "bits": 8 * size / _ELEMENTS,
        "bits_are_the_most": form.algebra is Algebra.GATHER or layout.varies,
        "kept_bytes": kept,
        "unbiased": law.unbiased,
        "conserves": law.conserves,
        "zeros": _zeros(variants_of(codec), codec),
        "bound": law.bound,
    }


def _zeros(variants: Sequence[Codec], codec: Codec) -> str:
    """Return when what is exactly 0 everywhere stays so."""
    if all(variant.properties().law.zeros for variant in variants):
        return "always"
    return "masked" if codec.properties().divides == "never" else "with Adam"


def text(found: list[dict[str, Any]]) -> str:
    """Return the same for people."""
    methods = table(_COLUMNS, [_line(one) for one in found], left=len(_COLUMNS))
    width = max(len(_label(one)) for one in found)
    wide = max(map(len, PRESETS)) + 2
    names = [
        textwrap.fill(call(name), _WIDTH, initial_indent=name.ljust(wide), subsequent_indent=" " * wide)
        for name in PRESETS
    ]
    return "\n".join([methods, "", _PRESETS, *names, "", _NOTES, "", _BOUNDS, *_bounds(found, width), "", _MORE])


def call(name: str) -> str:
    """Return the method that a preset stands for, with its options."""
    preset = PRESETS[name]
    words = [preset.method, *(f"{option}={value}" for option, value in preset.options.items())]
    if preset.updates:
        words += ["with local steps:", *(f"{option}={value}" for option, value in preset.updates.items())]
    return " ".join(words)


def _bounds(found: list[dict[str, Any]], width: int) -> Iterator[str]:
    """Yield the error bounds; that of a choice where it is not its method's."""
    usual = {one["method"]: one["bound"] for one in found if not one["options"]}
    for one in found:
        if not one["options"] or one["bound"] != usual[one["method"]]:
            first = f"{_label(one).ljust(width)}  "
            yield textwrap.fill(one["bound"], _WIDTH, initial_indent=first, subsequent_indent=" " * len(first))


def _label(one: dict[str, Any]) -> str:
    """Return a method's name, or a choice, which stands below its method; several options go by their preset's name."""
    if len(one["options"]) > 1:
        return f"  {next(name for name, preset in PRESETS.items() if preset.options == one['options'])}"
    options = " ".join(f"{name}={value}" for name, value in one["options"].items())
    return f"  {options}" if options else str(one["method"])


def _line(one: dict[str, Any]) -> tuple[str, ...]:
    several = len(one["collectives"]) > 1
    return (
        _label(one),
        one["payloads"],
        "any" if several else one["collectives"][0],
        f"{one['bits']:.3g}{'*' if one['bits_are_the_most'] else ''}",
        f"{one['kept_bytes']:.3g}",
        "yes" if one["unbiased"] else "no",
        "yes" if one["conserves"] else "no",
        one["zeros"],
    )


# ---- Markdown ----


def markdown() -> str:
    """Return the table of docs/methods.md: the methods with their default options."""
    from horovod_compress.codecs import registry

    kinds = [registry.codec_class(name) for name in registry.built_in()]
    lines = ["| " + " | ".join(_MARKDOWN_COLUMNS) + " |", "|---" * len(_MARKDOWN_COLUMNS) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(_cells(kind)) + " |" for kind in kinds)])


def _cells(kind: Any) -> tuple[str, ...]:
    from horovod_compress.codecs.base import variants_of
    from horovod_compress.exchange import wire
    from horovod_compress.fronts import factories

    one, form = entry(kind, {}), variants_of(kind())[0]
    options = ", ".join(f"`{field.name}={factories.shown(field.default)}`" for field in dataclasses.fields(kind))
    page = f"[{kind.page.partition('#')[0]}]({kind.page})" if kind.page else ""
    return (
        f"`{kind.name}`",
        kind.summary,
        f"{one['bits']:.3g}{'*' if one['bits_are_the_most'] else ''}",
        f"`0x{wire.codec_id(kind.name):04x}`, {form.wire_version}",
        _exchanges(kind),
        options or "none",
        "; ".join(filter(None, (kind.source, page))) or "-",
    )


def _exchanges(kind: Any) -> str:
    """Return the collectives that fit, and the single options with which others do."""
    from horovod_compress.codecs.base import variants_of
    from horovod_compress.errors import ConfigError
    from horovod_compress.exchange.choose import fitting
    from horovod_compress.fronts import factories

    def fit(options: dict[str, Any]) -> str:
        *names, last = fitting(variants_of(kind(**options))[0].algebra)
        return f"{', '.join(names)} or {last}" if names else last

    usual = fit({})
    found: dict[str, None] = {}  # a set that keeps its order
    for name, value in (option for sample in kind.samples for option in sample.items()):
        with contextlib.suppress(ConfigError):  # it does not stand alone
            if (other := fit({name: value})) != usual:
                found[f"{other} with `{name}={factories.shown(value)}`"] = None
    return "; ".join([usual, *found])
