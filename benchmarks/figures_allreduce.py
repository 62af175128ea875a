"""The plots of the all-reduce benchmark: time against size, and how many times faster than stock Horovod."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.bandwidth import BASELINE, NOTHING, label, speed_up
from benchmarks.figures import COLOURS, GREY, bars, dress, name_lines, new_figure, save
from benchmarks.results import Record, size_text

BLACK, BLUE, RED, GREEN, PINK, SKY, ORANGE = COLOURS
OLIVE = "#6B6B1F"  # contestants of the user's own
_FAMILIES = (
    ("horovod", BLACK),
    ("ddp powersgd", PINK),
    ("ddp", GREEN),
    ("marsit", RED),
    ("none", BLUE),
    ("fp16", SKY),
    ("global_qsgd", ORANGE),
)
_DASHES = {"fp16": "--", "fold": "--", "auto": ":", "r4": "--", "exponential": "--"}


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw every plot that the records have data for, and return the files."""
    first = next((r for r in records if r["name"] == "header"), {})
    measured = [r for r in records if "median_seconds" in r]
    found: list[Path] = []
    for place in _unique([r["place"] for r in measured]):
        ours = [r for r in measured if r["place"] == place]
        if len({r["bytes"] for r in ours}) > 1:
            found += times(ours, first, folder)
    for where in _unique([_where(r) for r in measured]):
        ours = [r for r in measured if _where(r) == where]
        largest = max(r["bytes"] for r in ours)
        found += speed_ups([r for r in ours if r["bytes"] == largest], first, folder)
    return found


def times(records: Sequence[Record], first: Record, folder: Path) -> list[Path]:
    """Draw time against size, both logarithmic, of one number of ranks and one rate."""
    place = records[0]["place"]
    title = f"Mean of one tensor over {place['ranks']} ranks, {rate_text(place)}: time against size"
    figure, (panel,) = new_figure(title, notes(records, first), 9.6, 4.9)
    for name in _unique([r["name"] for r in records]):
        points = sorted((r["bytes"], r["median_seconds"]) for r in records if r["name"] == name)
        sizes, medians = (list(column) for column in zip(*points, strict=True))
        colour, dash = style(name)
        panel.plot(sizes, medians, dash, color=colour, linewidth=1.7, marker="o", markersize=3.2, label=label(name))
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("size of the tensor in float32, logarithmic")
    panel.set_ylabel("median time, slowest rank, logarithmic")
    panel.xaxis.set_major_locator(LogLocator(base=10))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(value)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: seconds_text(value)))
    dress(panel)
    _make_room(figure, 0.2 + 0.075 * max(len(label(r["name"])) for r in records))
    figure.canvas.draw()  # the layout must be final before positions are measured
    name_lines(panel)
    return save(figure, folder / f"allreduce-time-{_stem(place)}-{place['ranks']}ranks")


def speed_ups(records: Sequence[Record], first: Record, folder: Path) -> list[Path]:
    """Draw bars of the speed-up over stock Horovod at one size, a panel for each rate."""
    places = sorted(_unique([r["place"] for r in records]), key=lambda place: place["rate_bits"] or float("inf"))
    with_base = [p for p in places if any(r["name"] == BASELINE and r["place"] == p for r in records)]
    if not with_base:
        return []
    place, size = with_base[0], records[0]["bytes"]
    names = [n for n in _unique([r["name"] for r in records]) if n != NOTHING]
    title = f"Times faster than stock Horovod in float32: {size_text(size)}, {place['ranks']} ranks"
    width = 2.9 + 2.9 * len(with_base)
    figure, panels = new_figure(title, notes(records, first), max(8.5, width), 0.8 + 0.30 * len(names), len(with_base))
    for number, (panel, here) in enumerate(zip(panels, with_base, strict=True)):
        cell = {r["name"]: r for r in records if r["place"] == here}
        shown = [name for name in names if name in cell]
        values = [speed_up(cell[name], list(cell.values())) or 0.0 for name in shown]
        base = cell[BASELINE]["median_seconds"]
        spreads = [(base / cell[name]["q3_seconds"], base / cell[name]["q1_seconds"]) for name in shown]
        bars(panel, [label(n) for n in shown], values, [style(n)[0] for n in shown], lambda v: f"{v:.2g}x", spreads)
        panel.axvline(1.0, color=GREY, linewidth=0.9)
        panel.set_title(rate_text(here), fontsize=10)
        if number:
            panel.set_yticklabels([])
    against = "times faster than hvd.allreduce_ in float32; the thin line is from quartile to quartile"
    figure.supxlabel(against, fontsize=9)
    rate = _stem(place) if len(with_base) == 1 else ("lab" if place["launcher"] == "lab" else "here")
    return save(figure, folder / f"allreduce-speedup-{rate}-{place['ranks']}ranks")


# ---- words ------------------------------------------------------------------------------------


def notes(records: Sequence[Record], first: Record) -> str:
    """Return what every plot has to say: what was measured, what was emulated, ranks and cores."""
    place, machine = records[0]["place"], first.get("machine", {})
    cores = f"{machine.get('cores', '?')} cores of {machine.get('processor', 'an unnamed processor')}"
    where = f"{place['ranks']} ranks on {cores}: kernels of one thread; exchange and decoding on separate threads"
    if place["launcher"] == "lab":
        links = f"{place['hosts']} emulated hosts; the rates of links are emulated by tc tbf"
    elif place["hosts"] == 1:
        links = "no network: bytes travel through this machine's memory"
    else:
        links = f"{place['hosts']} hosts with the network that they have"
    return (
        f"Real Horovod job, {where}; {links}.\n"
        f"Measured from a barrier to the slowest rank's result, codec included; medians of "
        f"{records[0]['repeats']}, all in turns; Marsit without full-precision rounds."
    )


def rate_text(place: Record) -> str:
    if place["launcher"] != "lab":
        return "one machine" if place["hosts"] == 1 else "the hosts' own network"
    return f"{place['rate']} links (emulated)" if place.get("rate") else "links without limit"


def style(name: str) -> tuple[str, str]:
    """Return colour and dashes of a contestant's line."""
    if name == NOTHING:
        return GREY, ":"
    colour = next((colour for family, colour in _FAMILIES if name.startswith(family)), OLIVE)
    dash = next((dash for word, dash in _DASHES.items() if word in label(name).split()[1:]), "-")
    return colour, dash


def seconds_text(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{1e3 * value:g} ms" if value >= 1e-3 else f"{1e6 * value:g} µs"


def _stem(place: Record) -> str:
    if place["launcher"] != "lab":
        return "here"
    return place.get("rate") or "unlimited"


def _where(record: Record) -> tuple[Any, ...]:
    return record["place"]["launcher"], record["place"]["hosts"], record["ranks"]


def _unique(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def _make_room(figure: Any, inches: float) -> None:
    """Keep the right edge free, for names beside the lines' ends."""
    engine = figure.get_layout_engine()
    left, bottom, width, height = engine.get()["rect"]
    engine.set(rect=(left, bottom, width - inches / figure.get_figwidth(), height))
