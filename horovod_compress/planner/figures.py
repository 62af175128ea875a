"""Pictures of predictions: time lines of a step, and steps over numbers of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: there may be no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .compute import FORWARD_SHARE
from .prediction import Timeline
from .predictions import Case, Cell, Found, name_of
from .report import place_text
from .text import milliseconds

# Okabe and Ito's colours, told apart with any colour vision; yellow is left out as too pale.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.")
FORWARD, BACKWARD, ARRIVAL = "#E4E6E9", "#C3C8CF", "#444444"
EXCHANGE, DECODE = ("#0072B2", "#7DB5DA"), ("#D55E00", "#EFA77C")  # neighbours alternate
ROWS = ("backward", "exchange", "decode")
_SUFFIXES = (".png", ".svg")
_LABEL_GAP = 10.5  # points between two names
_MOST_NAMED = 30  # buckets whose bars have their number


# ---- time lines of one world ------------------------------------------------------------------


def draw_timelines(case: Case, found: Found, target: str) -> list[Path]:
    """Draw one step with every schedule beneath each other; return the files.

    Args:
        target: a folder, which gets a PNG and an SVG, or one file that ends in .png or .svg.
    """
    lines = found.timelines
    figure, panels = plt.subplots(
        len(lines), 1, figsize=(10, 1.5 + 1.35 * len(lines)), sharex=True, squeeze=False, layout="constrained"
    )
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, 0, 1, 1 - 0.95 / figure.get_figheight()), hspace=0.06)
    _head(figure, f"{name_of(found.codec)}: predicted step by choice of buckets", place_text(case, _ranks(case)))
    end = 1e3 * max(line.slots[-1].decoded for line in lines)
    for panel, line in zip(panels[:, 0], lines, strict=True):
        _timeline(panel, line, case.compute)
        panel.set_xlim(0, 1.01 * end)
    panels[-1, 0].set_xlabel("milliseconds after the start of the step")
    _timeline_key(figure)
    stem = f"plan-{_file_name(case.table.model)}-{found.codec.name}-{case.world.ranks}ranks"
    return _save(figure, target, stem)


def _ranks(case: Case) -> str:
    return str(case.world.ranks)


def _timeline(panel: Axes, line: Timeline, compute: float) -> None:
    forward = 1e3 * FORWARD_SHARE * compute
    backward = 1e3 * line.arrivals.seconds[-1]
    panel.broken_barh([(0, forward)], (2.1, 0.8), color=FORWARD)
    panel.broken_barh([(forward, backward - forward)], (2.1, 0.8), color=BACKWARD)
    panel.vlines([1e3 * at for at in line.arrivals.seconds], 2.1, 2.5, color=ARRIVAL, linewidth=0.5)
    for number, slot in enumerate(line.slots):
        width = 1e3 * (slot.end - slot.begin)
        decoding = _decoding(line, number)
        panel.broken_barh([(1e3 * slot.begin, width)], (1.1, 0.8), color=EXCHANGE[number % 2])
        panel.broken_barh([decoding], (0.1, 0.8), color=DECODE[number % 2])
    _number(panel, line)
    last = 1e3 * line.slots[-1].decoded
    panel.axvline(last, color="black", linewidth=1)
    panel.axvline(1e3 * compute, color="black", linewidth=0.8, linestyle=":")
    buckets = f"{len(line.slots)} bucket{'s' if len(line.slots) > 1 else ''}"
    panel.set_title(
        f"{line.schedule}: {milliseconds(line.step)} ms, {buckets}, T1/TN {compute / line.step:.2f}",
        loc="left", fontsize=9.5, weight="bold", pad=3,
    )  # fmt: skip
    panel.set_yticks([2.5, 1.5, 0.5], ROWS, fontsize=8.5)
    panel.set_ylim(0, 3)
    panel.tick_params(axis="y", length=0)
    panel.grid(axis="x", color="#dddddd", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)


def _decoding(line: Timeline, number: int) -> tuple[float, float]:
    """Return begin and width of a bucket's decoding: behind its exchange and the decoding before."""
    before = line.slots[number - 1].decoded if number else 0.0
    begin = max(line.slots[number].end, before)
    return 1e3 * begin, 1e3 * (line.slots[number].decoded - begin)


def _number(panel: Axes, line: Timeline) -> None:
    """Write their numbers into bars that have room for them."""
    span = 1e3 * line.slots[-1].decoded
    if len(line.slots) > _MOST_NAMED:
        return
    for number, slot in enumerate(line.slots):
        if 1e3 * (slot.end - slot.begin) > 0.025 * span:
            middle = 1e3 * (slot.begin + slot.end) / 2
            colour = "white" if number % 2 == 0 else "black"
            panel.text(middle, 1.5, str(number), ha="center", va="center", fontsize=7.5, color=colour)


def _timeline_key(figure: Figure) -> None:
    handles: list[Any] = [
        Patch(color=FORWARD, label="forward"),
        Patch(color=BACKWARD, label="backward"),
        plt.Line2D([], [], color=ARRIVAL, marker="|", linestyle="", markersize=8, label="a gradient is ready"),
        Patch(color=EXCHANGE[0], label="encoding and exchange of a bucket"),
        Patch(color=DECODE[0], label="decoding"),
        plt.Line2D([], [], color="black", linewidth=0.8, linestyle=":", label="T1, compute only"),
        plt.Line2D([], [], color="black", linewidth=1, label="end of the step"),
    ]
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.008, 1 - 0.62 / figure.get_figheight()), ncols=7,
        frameon=False, fontsize=8, handlelength=1.4, columnspacing=1.2, handletextpad=0.5, borderpad=0,
    )  # fmt: skip


# ---- numbers of ranks -------------------------------------------------------------------------


def draw_worlds(case: Case, found: Sequence[Cell], target: str) -> list[Path]:
    """Draw step time and scaling factor over ranks, a line for each method; return the files.

    Args:
        target: as for :func:`draw_timelines`.
    """
    names = list(dict.fromkeys(cell.method for cell in found if cell.timeline and cell.available))
    ranks = sorted({cell.ranks for cell in found})
    height = max(4.2, 1.0 + _LABEL_GAP / 72 * 1.15 * len(names))
    figure, panels = plt.subplots(1, 2, figsize=(12.5, height + 0.8), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, 0, 0.985, 1 - 0.6 / (height + 0.8)), wspace=0.18)
    _head(figure, "Predicted step by number of ranks, each with its best buckets", place_text(case, _listed(ranks)))
    for panel, words in zip(panels, ("milliseconds a step", "scaling factor T1/TN"), strict=True):
        for number, name in enumerate(names):
            _line(panel, case, [cell for cell in found if cell.method == name and cell.timeline], number, words)
        panel.set_xscale("log")
        panel.set_xticks(ranks, [str(number) for number in ranks])
        panel.minorticks_off()
        panel.set_xlabel("ranks")
        panel.set_ylabel(words)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panels[1].set_ylim(0, 1.02)
    for panel in panels:
        panel.margins(x=0.02)
        _make_room(panel, ranks)
    figure.canvas.draw()  # the layout must be final before positions are measured
    for panel in panels:
        _name_lines(panel, max(ranks))
    return _save(figure, target, f"worlds-{_file_name(case.table.model)}")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _line(panel: Axes, case: Case, cells: Sequence[Cell], number: int, words: str) -> None:
    steps = [cell.timeline.step for cell in cells if cell.timeline]
    values = [1e3 * step for step in steps] if "milli" in words else [case.compute / step for step in steps]
    panel.plot(
        [cell.ranks for cell in cells], values, DASHES[number // len(COLOURS) % len(DASHES)],
        color=COLOURS[number % len(COLOURS)], marker="o", markersize=3.5, linewidth=1.5, label=cells[0].method,
    )  # fmt: skip


def _make_room(panel: Axes, ranks: Sequence[int]) -> None:
    """Leave a part of the panel, right of the last number of ranks, for names."""
    low, high = min(ranks), max(ranks)
    span = max(high / low, 2.0)
    panel.set_xlim(low / span**0.03, high * span**0.42)


def _name_lines(panel: Axes, last: int) -> None:
    """Name every line at its end; names are pushed apart, and a thin line leads from each to its own."""
    lines: list[Any] = list(panel.get_lines())
    ends = [(float(line.get_xdata()[-1]), float(line.get_ydata()[-1])) for line in lines]
    dots = panel.get_figure().dpi  # type: ignore[union-attr]
    points = panel.transData.transform(ends) * 72 / dots
    low, high = panel.get_window_extent().y0 * 72 / dots, panel.get_window_extent().y1 * 72 / dots
    column = panel.transData.transform((last, ends[0][1]))[0] * 72 / dots + 26
    for line, end, (x, y), height in zip(
        lines, ends, points, _apart([y for _, y in points], low + 5, high - 5), strict=True
    ):
        # A name far from where its line ends has a pale leader, which nobody takes for data.
        colour, pale = line.get_color(), end[0] < last
        panel.annotate(
            str(line.get_label()), end, xytext=(column - x, height - y), textcoords="offset points",
            color=colour, fontsize=8, va="center", annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": "#BBBBBB" if pale else colour, "linewidth": 0.6,
                "relpos": (0.0, 0.5), "shrinkA": 1, "shrinkB": 3,
            },
        )  # fmt: skip


def _apart(heights: Sequence[float], low: float, high: float) -> list[float]:
    """Return heights, in the same order, at least a line apart and between two bounds if there is room."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    found = list(heights)
    at = low - _LABEL_GAP
    for number in order:  # upwards
        at = found[number] = max(found[number], at + _LABEL_GAP)
    at = max(high, low + _LABEL_GAP * (len(order) - 1)) + _LABEL_GAP
    for number in reversed(order):  # and back down from the upper bound
        at = found[number] = min(found[number], at - _LABEL_GAP)
    return found


# ---- files ------------------------------------------------------------------------------------


def _head(figure: Figure, title: str, notes: str) -> None:
    height = figure.get_figheight()
    figure.text(0.012, 1 - 0.10 / height, title, fontsize=13, weight="bold", va="top")
    figure.text(0.012, 1 - 0.36 / height, f"{notes}; a model, not measured", fontsize=8.5, color="#444444", va="top")


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in text)


def _save(figure: Figure, target: str, stem: str) -> list[Path]:
    path = Path(target)
    one_file = path.suffix in _SUFFIXES and not path.is_dir()
    paths = [path] if one_file else [path / f"{stem}{suffix}" for suffix in _SUFFIXES]
    for each in paths:
        each.parent.mkdir(parents=True, exist_ok=True)
        temporary = each.with_name(f"{each.name}.tmp{os.getpid()}")
        # No date: the same predictions give the same file.
        more: dict[str, Any] = {"metadata": {"Date": None}} if each.suffix == ".svg" else {"dpi": 150}
        try:
            figure.savefig(temporary, format=each.suffix[1:], **more)
            temporary.replace(each)
        finally:
            temporary.unlink(missing_ok=True)
    plt.close(figure)
    return paths
