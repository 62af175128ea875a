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

from ..common import milliseconds
from .prediction import FORWARD_SHARE, Case, Cell, Found, Timeline, name_of
from .report import place_text

# Okabe and Ito's colours, told apart with any colour vision; yellow is left out as too pale.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", "--", ":", "-.")
FORWARD, BACKWARD, ARRIVAL = "#E4E6E9", "#C3C8CF", "#444444"
EXCHANGE, DECODE = ("#0072B2", "#7DB5DA"), ("#D55E00", "#EFA77C")  # neighbours alternate
ROWS = ("backward", "exchange", "decode")
_SUFFIXES = (".png", ".svg")
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
    title = f"{name_of(found.codec)}: predicted step by choice of buckets"
    _head(figure, title, place_text(case, str(case.world.ranks)), 0.95, hspace=0.06)
    end = 1e3 * max(line.slots[-1].decoded for line in lines)
    for panel, line in zip(panels[:, 0], lines, strict=True):
        _timeline(panel, line, case.compute)
        panel.set_xlim(0, 1.01 * end)
    panels[-1, 0].set_xlabel("milliseconds after the start of the step")
    _timeline_key(figure)
    stem = f"plan-{_file_name(case.table.model)}-{found.codec.name}-{case.world.ranks}ranks"
    return _save(figure, target, stem)


def _timeline(panel: Axes, line: Timeline, compute: float) -> None:
    forward = 1e3 * FORWARD_SHARE * compute
    backward, last = 1e3 * line.arrivals.seconds[-1], 1e3 * line.slots[-1].decoded
    panel.broken_barh([(0, forward)], (2.1, 0.8), color=FORWARD)
    panel.broken_barh([(forward, backward - forward)], (2.1, 0.8), color=BACKWARD)
    panel.vlines([1e3 * at for at in line.arrivals.seconds], 2.1, 2.5, color=ARRIVAL, linewidth=0.5)
    for number, slot in enumerate(line.slots):
        width = 1e3 * (slot.end - slot.begin)
        began = max(slot.end, line.slots[number - 1].decoded if number else 0.0)  # after the decoding before
        panel.broken_barh([(1e3 * slot.begin, width)], (1.1, 0.8), color=EXCHANGE[number % 2])
        panel.broken_barh([(1e3 * began, 1e3 * (slot.decoded - began))], (0.1, 0.8), color=DECODE[number % 2])
        if len(line.slots) <= _MOST_NAMED and width > 0.025 * last:  # there is room for its number
            middle, colour = 1e3 * (slot.begin + slot.end) / 2, ("white", "black")[number % 2]
            panel.text(middle, 1.5, str(number), ha="center", va="center", fontsize=7.5, color=colour)
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
    names = list(dict.fromkeys(cell.method for cell in found if cell.timeline))
    ranks = sorted({cell.ranks for cell in found})
    height = max(5.0, 1.8 + 0.17 * len(names))
    figure, panels = plt.subplots(1, 2, figsize=(12.5, height), layout="constrained")
    place = place_text(case, ", ".join(map(str, ranks)))
    _head(figure, "Predicted step by number of ranks, each with its best buckets", place, 0.6, wspace=0.06)
    for number, name in enumerate(names):
        steps = {cell.ranks: cell.timeline.step for cell in found if cell.method == name and cell.timeline}
        look: dict[str, Any] = {
            "linestyle": DASHES[number // len(COLOURS) % len(DASHES)], "color": COLOURS[number % len(COLOURS)],
            "marker": "o", "markersize": 3.5, "linewidth": 1.5, "label": name,
        }  # fmt: skip
        panels[0].plot(list(steps), [1e3 * step for step in steps.values()], **look)
        panels[1].plot(list(steps), [case.compute / step for step in steps.values()], **look)
    for panel, words in zip(panels, ("milliseconds a step", "scaling factor T1/TN"), strict=True):
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
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8, handlelength=3
    )
    return _save(figure, target, f"worlds-{_file_name(case.table.model)}")


# ---- files ------------------------------------------------------------------------------------


def _head(figure: Figure, title: str, notes: str, inches: float, **spaces: float) -> None:
    """Write what a figure shows into so many inches at its top, and leave the rest to the panels."""
    height = figure.get_figheight()
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, 0, 1, 1 - inches / height), **spaces)
    figure.text(0.012, 1 - 0.10 / height, title, fontsize=13, weight="bold", va="top")
    figure.text(0.012, 1 - 0.36 / height, f"{notes}; a model, not measured", fontsize=8.5, color="#444444", va="top")


def _file_name(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in text)


def _save(figure: Figure, target: str, stem: str) -> list[Path]:
    path = Path(target)
    one_file = path.suffix in _SUFFIXES and not path.is_dir()
    paths = [path] if one_file else [path / f"{stem}{suffix}" for suffix in _SUFFIXES]
    for each in paths:
        each.parent.mkdir(exist_ok=True)
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
