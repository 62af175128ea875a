"""The report of all parts, for programs and for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .part import Part
from .result import NOT_RUN, RIGHT, WRONG, Result, Results, write_whole

#: Columns of the benchmark's table: what they hold, their heading, and what to multiply by.
_COLUMNS = (
    ("median_seconds", "median us", 1e6, ".1f"),
    ("bytes_per_second", "GB/s", 1e-9, ".1f"),
    ("fraction_of_copy", "of copy", 1.0, ".2f"),
)
_KINDS = (RIGHT, WRONG, NOT_RUN)


def collected(parts: Sequence[Part], results: Results) -> list[Result]:
    """Return a result for every part; those for other sources or another machine do not count."""
    missing = "not run for these sources on this machine"
    return [results.current(part.name) or Result(part.name, NOT_RUN, missing) for part in parts]


def status(results: Sequence[Result]) -> int:
    """Return 0 if all parts are right, 1 if one is wrong, 2 if none has run, 3 if some have not."""
    kinds = {result.result for result in results}
    if WRONG in kinds:
        return 1
    if RIGHT not in kinds:
        return 2
    return 3 if NOT_RUN in kinds else 0


def summary(results: Sequence[Result]) -> str:
    """Return one line: how many parts are right, wrong and not run."""
    counts = {kind: sum(result.result == kind for result in results) for kind in _KINDS}
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())


def write(folder: Path, facts: Mapping[str, Any], key: str, parts: Sequence[Part], results: Sequence[Result]) -> None:
    """Write report.json and report.md."""
    document = {"machine": dict(facts), "key": key, "parts": [asdict(result) for result in results]}
    write_whole(folder / "report.json", json.dumps(document, indent=1) + "\n")
    write_whole(folder / "report.md", "\n".join(_lines(facts, key, parts, results)) + "\n")


def _lines(facts: Mapping[str, Any], key: str, parts: Sequence[Part], results: Sequence[Result]) -> Iterator[str]:
    yield "# Check of the CUDA kernels"
    yield from ("", f"{summary(results)}. Sources and machine: `{key}`.", "", "## Machine", "")
    yield from _table(["", ""], [[name, value] for name, value in facts.items()])
    yield from ("", "## Parts", "")
    about = {part.name: part.about for part in parts}
    rows = [
        [
            f"`{result.part}`",
            result.result,
            f"{result.seconds:.0f}" if result.seconds else "",
            about[result.part],
            result.reason,
        ]
        for result in results
    ]
    yield from _table(["part", "result", "seconds", "what", "why"], rows)
    for result in results:
        if result.figures:
            yield from ("", f"## {result.part}", "")
            for name, value in result.figures.items():
                yield from _figure(name, value)
    for result in results:
        if result.result == WRONG:
            yield from ("", f"## Output of {result.part}", "", f"`{result.command}`", "", "````", result.output, "````")


def _figure(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and name.startswith("curve "):
        yield from ("", f"{name.removeprefix('curve ')}, held-out loss:", "")
        yield from _table(["step", *value], _curve(value))
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        yield from ("", *_table(["name", *(column[1] for column in _COLUMNS), "wrong"], _records(value)))
    elif isinstance(value, Mapping):
        yield f"- {name}: " + "; ".join(f"{key} {_shown(part)}" for key, part in value.items())
    else:
        yield f"- {name}: {_shown(value)}"


def _curve(curves: Mapping[str, Sequence[Sequence[float]]]) -> list[list[Any]]:
    """Return a row for each step, with the loss of each curve."""
    points = [{point[0]: point[1] for point in curve} for curve in curves.values()]
    steps = sorted(set().union(*points))
    return [[f"{step:g}", *(f"{mine[step]:.4f}" if step in mine else "" for mine in points)] for step in steps]


def _records(records: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [
        [
            record["name"],
            *(f"{record[name] * factor:{form}}" for name, _, factor, form in _COLUMNS),
            "" if record.get("wrong") is None else record["wrong"],
        ]
        for record in records
        if all(name in record for name in ("name", *(column[0] for column in _COLUMNS)))
    ]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "none" if not value else "; ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _table(heading: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield _row(heading)
    yield _row(["---"] * len(heading))
    for row in rows:
        yield _row([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
