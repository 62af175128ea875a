"""The plots of the benchmarks, and the style that all of them share.

Every plot says under its title what was measured, and what was emulated; lines and bars are named
where they are, instead of in a legend.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: there may be no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart with any colour vision; yellow is left out as too pale.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
GREY = "#777777"
SUFFIXES = (".svg", ".png")
LINE_GAP = 12.0  # points between two labels


# ---- style ------------------------------------------------------------------------------------


def new_figure(title: str, notes: str, width: float, height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure with its panels in a row, below a title and what has to be said about it."""
    title, notes = wrapped(title, width, 13, 0.62), wrapped(notes, width, 8.5, 0.53)
    # Inches: the first line's height, then what each further line of the title and of the notes takes.
    top = 0.14 + 0.22 * (1 + title.count("\n"))
    head = top + 0.14 + 0.165 * (1 + notes.count("\n"))
    figure, grid = plt.subplots(1, columns, figsize=(width, height + head), squeeze=False, layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0.0, 0.0, 1.0, height / (height + head)), w_pad=0.08, wspace=0.04)
    figure.text(0.012, 1 - 0.10 / (height + head), title, fontsize=13, weight="bold", va="top")
    figure.text(0.012, 1 - top / (height + head), notes, fontsize=8.5, color="#444444", va="top", linespacing=1.35)
    return figure, list(grid[0])


def wrapped(text: str, width: float, fontsize: float, letter: float) -> str:
    """Return text with line breaks, so that it fits into so many inches.

    Args:
        letter: mean width of a letter, as a share of the font's size.
    """
    columns = int(0.976 * width * 72 / (fontsize * letter))
    return "\n".join(part for line in text.splitlines() for part in textwrap.wrap(line, columns))


def dress(panel: Axes, axis: str = "both") -> None:
    """Give a panel the common look."""
    panel.grid(axis=axis, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure beside each other as SVG and PNG and return both paths; whole files or none."""
    paths = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]
    for path in paths:
        save_as(figure, path)
    plt.close(figure)
    return paths


def save_as(figure: Figure, path: Path) -> None:
    """Write a figure into one file, by its suffix.

    Raises:
        ValueError: the suffix is neither .svg nor .png.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a plot is written as {' or '.join(SUFFIXES)}, not {path.suffix or path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    try:
        # No date: the same records give the same file.
        more: dict[str, Any] = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 150}
        figure.savefig(temporary, format=path.suffix[1:], **more)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def apart(heights: Sequence[float], gap: float = LINE_GAP) -> list[float]:
    """Return heights, in the same order, that are at least a gap apart and moved as little as can be."""
    found = list(heights)
    order = sorted(range(len(found)), key=lambda number: found[number])
    for _ in range(200):  # pushing one pair apart may push another together
        moved = False
        for low, high in pairwise(order):
            overlap = gap - (found[high] - found[low])
            if overlap > 1e-3:
                found[high] += overlap / 2
                found[low] -= overlap / 2
                moved = True
        if not moved:
            break
    return found


def name_lines(panel: Axes, fontsize: float = 8.5) -> None:
    """Name every line right of its last point, in its colour; the figure's layout must be final."""
    figure: Any = panel.figure
    drawn: list[Any] = list(panel.get_lines())
    lines = [line for line in drawn if len(line.get_xdata()) and not line.get_label().startswith("_")]
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines]
    if not lines:
        return
    right = max(x for x, _ in ends)
    points = panel.transData.transform([(right, y) for _, y in ends]) * 72 / figure.dpi
    heights = apart([y for _, y in points])
    for line, (_, end), (_, y), height in zip(lines, ends, points, heights, strict=True):
        panel.annotate(
            line.get_label(),
            (right, end),
            xytext=(26.0, height - y),
            textcoords="offset points",
            color=line.get_color(),
            fontsize=fontsize,
            ha="left",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": line.get_color(),
                "linewidth": 0.6,
                "relpos": (0.0, 0.5),  # from the left edge of the name, so that it crosses no other name
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )


def bars(
    panel: Axes,
    names: Sequence[str],
    values: Sequence[float],
    colours: Sequence[str],
    text: Callable[[float], str],
    spreads: Sequence[tuple[float, float]] | None = None,
) -> None:
    """Draw horizontal bars, the first on top, with each value as text behind its bar.

    Args:
        spreads: from where to where each value varied, drawn as a thin line.
    """
    places = list(range(len(names)))
    panel.barh(places, values, color=list(colours), height=0.72)
    ends = list(values)
    if spreads is not None:
        for place, (low, high) in zip(places, spreads, strict=True):
            panel.plot([low, high], [place, place], color=GREY, linewidth=1.2, label="_spread")
        ends = [max(value, high) for value, (_, high) in zip(values, spreads, strict=True)]
    for place, value, end in zip(places, values, ends, strict=True):
        panel.annotate(
            text(value),
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},  # readable across a line
        )
    panel.set_yticks(places, names, fontsize=9)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_xlim(0, 1.12 * max([*ends, 1e-12]))
    panel.tick_params(axis="y", length=0)
    dress(panel, "x")
    panel.spines["left"].set_visible(False)
