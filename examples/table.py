"""The demo's table: one row for each run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

HEADINGS = (
    "task",
    "method",
    "held-out result",
    "sent/step",
    "vs fp32 ring",
    "step, ms",
    "exchange, ms",
    "ranks identical",
)
NOTES = """\
method:          horovod-none is Horovod alone; none is this package without compression
held-out result: accuracy (higher is better) or loss in nats per character (lower is better), one seed
sent/step:       bytes one rank sent, mean of all steps; * computed, since Horovod does not count them
vs fp32 ring:    how many times fewer bytes than an uncompressed ring all-reduce
step:            backward, exchange and optimizer, median (quartiles); exchange: mean, partly behind backward"""


def row(record: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one run."""
    config, stats = record["config"], record["stats"]
    return (
        config["task"],
        config["method"],
        result(record["final"]),
        sent_per_step(stats),
        ratio(stats),
        step_time(record["step_seconds"]),
        milliseconds(record["exchange_seconds_per_step"]),
        "yes" if record["ranks_identical"] else "NO",
    )


def render(records: list[dict[str, Any]]) -> str:
    """Return the table and its notes as text; a blank line parts the tasks."""
    rows = [row(record) for record in records]
    widths = [max(map(len, column)) for column in zip(HEADINGS, *rows, strict=True)]
    lines = [_line(HEADINGS, widths), "  ".join("-" * width for width in widths)]
    for before, cells in pairwise([rows[0], *rows]):
        if cells[0] != before[0]:
            lines.append("")
        lines.append(_line(cells, widths))
    return "\n".join(lines) + "\n\n" + NOTES


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    words = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True)]
    return "  ".join(words + numbers)


def result(final: dict[str, Any]) -> str:
    if final["metric"] == "accuracy":
        return f"{final['accuracy']:.1%} accuracy"
    return f"{final['loss']:.3f} nats/char"


def sent_per_step(stats: dict[str, Any]) -> str:
    mark = "*" if stats.get("bytes_computed") else ""
    return size(stats["bytes_sent"] / stats["steps"]) + mark if stats["steps"] else "-"


def size(count: float) -> str:
    """Return a number of bytes in the unit that leaves a short number."""
    for unit in ("B", "kB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} MB"


def ratio(stats: dict[str, Any]) -> str:
    return f"{stats['bytes_dense'] / stats['bytes_sent']:.1f}x" if stats["bytes_sent"] else "-"


def step_time(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    median, low, high = (1000 * spread[key] for key in ("median", "q1", "q3"))
    return f"{median:.1f} ({low:.1f}-{high:.1f})"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.2f}"
