"""Tables and numbers as text."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return aligned text; the first ``left`` columns are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), "  ".join("-" * width for width in widths), *map(line, rows)])


def milliseconds(seconds: float | None) -> str:
    """Return a time with three digits, "-" for None."""
    if seconds is None:
        return "-"
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
