"""A strict reader of Prometheus' text format, version 0.0.4."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|Inf)|NaN")
_KINDS = {"counter", "gauge", "histogram", "summary", "untyped"}
_ESCAPED = {r"\"": '"', r"\\": "\\", r"\n": "\n"}


class Malformed(Exception):
    """This is not the format; says where."""


@dataclass
class Family:
    """One metric: its kind, its help, and the values of its series by their labels."""

    help: str
    kind: str = ""
    series: dict[frozenset[tuple[str, str]], float] = field(default_factory=dict)

    def only(self) -> float:
        (value,) = self.series.values()
        return value


def parse(text: str) -> dict[str, Family]:
    """Return all metrics; raises Malformed for what Prometheus or its node exporter would refuse."""
    if not text.endswith("\n"):
        raise Malformed("the last line has no end")
    found: dict[str, Family] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, said = line.split(" ", 3)
            if name in found:
                raise Malformed(f"a second HELP of {name}, or its series are apart")
            found[name] = Family(said)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            if name != next(reversed(found), None) or found[name].kind or found[name].series or kind not in _KINDS:
                raise Malformed(f"TYPE does not follow HELP: {line}")
            found[name].kind = kind
        else:
            _add(found, line)
    if empty := [name for name, family in found.items() if not family.series or not family.kind]:
        raise Malformed(f"no type, or no series: {empty}")
    return found


def _add(found: dict[str, Family], line: str) -> None:
    match = _SAMPLE.fullmatch(line)
    if not match or not _NUMBER.fullmatch(match[3]):
        raise Malformed(f"no sample: {line}")
    name = match[1]
    if name != next(reversed(found), None) or not found[name].kind:
        raise Malformed(f"a sample of {name} that does not follow its TYPE")
    if (found[name].kind == "counter") != name.endswith("_total"):
        raise Malformed(f"counters, and only they, end in _total: {name}")
    labels = frozenset(_labels(match[2] or "").items())
    if labels in found[name].series:
        raise Malformed(f"the series occurs twice: {line}")
    found[name].series[labels] = float(match[3])


def _labels(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    while text:
        match = _LABEL.match(text)
        if not match or match[1] in found or (match[3] == "," and not text[match.end() :]):
            raise Malformed(f"no labels: {text}")
        found[match[1]] = re.sub(r"\\.", lambda escaped: _ESCAPED[escaped[0]], match[2])
        text = text[match.end() :]
    return found
