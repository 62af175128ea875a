"""Draw what runs needed to reach the same loss: seconds on a slow link, else megabytes sent.

python examples/plot.py one.json two.json --out demo.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # files only: there may be no display
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import table
from files import write_whole
from target import axis, needed, rate, target, times_better

# Okabe and Ito's colours, told apart with any colour vision; yellow is left out as too pale.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
NAMES = {"horovod-none": "stock Horovod", "horovod-fp16": "stock Horovod, fp16"}
SCALE = {"seconds": 1.0, "bytes_sent": 1e-6}
UNIT = {"seconds": "s", "bytes_sent": "MB"}
CLEAR = 1.1  # a difference below this ratio is no finding
ROW = 0.065  # of the panel's height, one line of text

Record = dict[str, Any]


def draw(records: list[Record]) -> Figure:
    """Return the figure: loss against what it cost, and the bytes of one step."""
    figure, (curves, bars) = plt.subplots(
        1, 2, figsize=(11.5, 5.4), width_ratios=(2.3, 1), layout="constrained", squeeze=True
    )
    _draw_curves(curves, records)
    _draw_bars(bars, records)
    figure.suptitle(finding(records), fontsize=15, fontweight="bold", x=0.01, ha="left")
    figure.supxlabel(footnote(records[0]), fontsize=9, color="#555555", x=0.01, ha="left")
    return figure


def finding(records: list[Record]) -> str:
    """Return in one sentence what the records show."""
    what, base = axis(records), name(records[0])
    found = times_better(records, what)
    best = max(range(len(records)), key=lambda number: found[number] or 0.0)
    much = found[best] or 0.0
    link = f" on a {table.link(records[0])} link" if rate(records[0]) else ""
    if much < CLEAR:
        return f"Nothing reached the same loss {'faster' if link else 'with fewer bytes'} than {base}{link}"
    if link:
        return f"{name(records[best])} reaches the same loss {much:.1f}x faster than {base}{link}"
    return f"{name(records[best])} reaches the same loss with {much:.1f}x fewer bytes than {base}"


def footnote(record: Record) -> str:
    found = record["versions"]
    text = f"{table.what(record)}\ntorch {found['torch']}, Horovod {found['horovod']}, evaluations not counted"
    return text if rate(record) else f"{text}; for seconds on a slow link: sudo make demo"


def name(record: Record) -> str:
    method: str = record["config"]["method"]
    return NAMES.get(method, method)


def _draw_curves(panel: Axes, records: list[Record]) -> None:
    what = axis(records)
    for record, colour in zip(records, _colours(records), strict=True):
        points = [point for point in record["curve"] if point["loss"] is not None]
        across = [SCALE[what] * point[what] for point in points]
        panel.plot(across, [point["loss"] for point in points], color=colour, linewidth=2.2)
    seconds = f"seconds of training, {table.link(records[0])} link" if what == "seconds" else ""
    panel.set_xlabel(seconds or "megabytes sent by one rank", fontsize=11)
    panel.set_ylabel("held-out loss, nats per character: lower is better", fontsize=11)
    panel.set_xlim(0, 1.36 * panel.get_xlim()[1])  # room for the names
    _open(panel)
    _mark_target(panel, records, what)


def _mark_target(panel: Axes, records: list[Record], what: str) -> None:
    """Mark where each run reaches the common loss, with its name and what it needed, as stairs.

    The slowest stands on the highest stair: no name then hides the way down of a faster one.
    """
    loss, better = target(records), times_better(records, what)
    reached = [(needed(record, loss, what), number) for number, record in enumerate(records)]
    known = sorted(((SCALE[what] * amount, number) for amount, number in reached if amount is not None), reverse=True)
    low, high = panel.get_ylim()
    row = ROW * (high - low) / (1 - ROW * (len(known) + 1))
    panel.set_yticks([tick for tick in panel.get_yticks() if low <= tick <= high])  # none beside the names
    panel.set_ylim(low - row * (len(known) + 0.5), high)
    panel.axhline(loss, color="#888888", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    panel.text(1, loss, f"loss {loss:.2f}", transform=panel.get_yaxis_transform(), ha="right", va="bottom", fontsize=10)
    for stair, (across, number) in enumerate(known):
        colour, text = _colours(records)[number], f"{name(records[number])}: {across:.1f} {UNIT[what]}"
        if number and (ratio := better[number]):
            text += f", {_times(ratio, what)}"
        panel.plot([across, across], [loss, low - stair * row], color=colour, linewidth=1.0, zorder=1)
        panel.plot([across], [loss], color=colour, marker="o", markersize=8, zorder=4)
        _label(panel, across, low - stair * row, text, colour)


def _times(ratio: float, what: str) -> str:
    """Return in words how a need compares with the first one, which is `ratio` times as large."""
    less, more = ("faster", "slower") if what == "seconds" else ("less", "more")
    return f"{ratio:.1f}x {less}" if ratio >= 1 else f"{1 / ratio:.1f}x {more}"


def _label(panel: Axes, across: float, height: float, text: str, colour: str) -> None:
    panel.annotate(
        text,
        (across, height),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        fontsize=11,
        fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        zorder=3,
    )


def _draw_bars(panel: Axes, records: list[Record]) -> None:
    sent = [record["stats"]["bytes_sent"] / max(1, record["stats"]["steps"]) for record in records]
    panel.barh(range(len(records)), [count / 1e6 for count in sent], color=_colours(records), height=0.45)
    for number, (record, count) in enumerate(zip(records, sent, strict=True)):
        less = f", {sent[0] / count:.1f}x less" if count and number else ""
        text = f"{name(record)}: {table.size(count)}{less}"
        panel.text(0, number - 0.29, text, fontsize=11, color=_colours(records)[number], fontweight="bold", va="bottom")
    panel.set_ylim(len(records) - 0.6, -0.75)
    panel.set_yticks([])
    panel.set_xlabel("megabytes one rank sends per step", fontsize=11)
    _open(panel)
    panel.spines["left"].set_visible(False)


def _colours(records: list[Record]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(records))]


def _open(panel: Axes) -> None:
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(labelsize=10)


def save(records: list[Record], path: Path) -> None:
    """Draw the records into a PNG file; records; the others are compared with the first."""
    figure = draw(records)
    write_whole(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw records written by train.py --json, or by the demo.")
    parser.add_argument("records", nargs="+", type=Path, help="records; the others are compared with the first")
    parser.add_argument("--out", type=Path, default=Path("demo.png"))
    chosen = parser.parse_args()
    save([json.loads(path.read_text()) for path in chosen.records], chosen.out)
    print(f"wrote {chosen.out}")


if __name__ == "__main__":
    main()
