"""Draw the curves of training records: result against steps and against bytes sent.

python examples/plot.py one.json two.json --out curves.png
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
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from files import write_whole

# Okabe and Ito's colours, told apart with any colour vision; yellow is left out as too pale.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
AXIS = {"accuracy": "held-out accuracy, % of images", "loss": "held-out loss, nats per character"}
LINE_GAP = 13.0  # points between two labels
LETTER_WIDTH = 6.0  # points, a little more than a letter of a label takes

Record = dict[str, Any]


def draw(records: list[Record]) -> Figure:
    """Return a figure with a row for each task: against steps, and against megabytes."""
    tasks = list(dict.fromkeys(record["config"]["task"] for record in records))
    methods = list(dict.fromkeys(record["config"]["method"] for record in records))
    figure, grid = plt.subplots(
        len(tasks), 2, figsize=(11.5, 0.9 + 3.7 * len(tasks)), squeeze=False, layout="constrained"
    )
    for axes, task in zip(grid, tasks, strict=True):
        ours = [record for record in records if record["config"]["task"] == task]
        for panel, against in zip(axes, (steps, megabytes), strict=True):
            _panel(panel, ours, methods, against)
    figure.suptitle(title(records), fontsize=12, x=0.01, ha="left")
    figure.canvas.draw()  # the layout must be final before positions are measured
    for axes in grid:
        for panel, against in zip(axes, (steps, megabytes), strict=True):
            _name_lines(panel, against)
    return figure


def title(records: list[Record]) -> str:
    """Return what was measured, where and how often."""
    config, found = records[0]["config"], records[0]["versions"]
    seeds = sorted({record["config"]["seed"] for record in records})
    return (
        "Training with and without gradient compression: results on held-out data\n"
        f"{config['world']} Horovod ranks on {config['cores']} CPU cores, "
        f"seed {', '.join(map(str, seeds))}, torch {found['torch']}, Horovod {found['horovod']}"
    )


def steps(point: Record) -> float:
    return point["step"]


def megabytes(point: Record) -> float:
    return point["bytes_sent"] / 1e6


def _panel(panel: Axes, records: list[Record], methods: list[str], against: Any) -> None:
    metric = records[0]["final"]["metric"]
    scale = 100.0 if metric == "accuracy" else 1.0
    for record in records:
        number = methods.index(record["config"]["method"])
        # A logarithmic axis has no place for the point before the first byte.
        points = [point for point in record["curve"] if against is steps or against(point) > 0]
        panel.plot(
            [against(point) for point in points],
            [scale * point[metric] if point[metric] is not None else float("nan") for point in points],
            label=record["config"]["method"],
            color=COLOURS[number % len(COLOURS)],
            linewidth=max(1.5, 4.5 - number),  # a thinner line leaves an equal one below it visible
            marker="o",
            markersize=3.5,
        )
    _dress(panel, records[0], against)


def _dress(panel: Axes, record: Record, against: Any) -> None:
    config = record["config"]
    panel.set_ylabel(AXIS[record["final"]["metric"]])
    panel.grid(color="#dddddd", linewidth=0.6)
    panel.spines[["top", "right"]].set_visible(False)
    panel.set_title(f"{config['task']}, {config['parameters']:,} parameters, {config['optimizer']}", fontsize=10)
    panel.margins(x=0.06, y=0.18)  # names need room above and below the lines
    if against is megabytes:
        panel.set_xlabel("megabytes sent by one rank, logarithmic")
        panel.set_xscale("log")
        panel.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_locator(NullLocator())
    else:
        panel.set_xlabel("training steps")
        last = record["config"]["last_step"]
        panel.set_xticks([tick for tick in panel.get_xticks() if 0 <= tick <= last])
        panel.set_xlim(right=1.25 * last)  # room for the names
    if record["final"]["metric"] == "accuracy":
        panel.set_yticks(range(0, 101, 20))
        panel.set_ylim(-8, 110)  # names stand below the lowest points


def _name_lines(panel: Axes, against: Any) -> None:
    """Name every line beside it, in its colour, where the lines are furthest apart.

    Against steps all lines end at one place, so the names stand right of it. Against
    bytes the lines start far apart, so each name stands at the start of its line.
    """
    index = 0 if against is megabytes else -1
    drawn: list[Any] = list(panel.get_lines())
    lines = [line for line in drawn if len(line.get_xdata())]
    anchors = [(line.get_xdata()[index], line.get_ydata()[index]) for line in lines]
    points = panel.transData.transform(anchors) * 72 / panel.figure.dpi
    way = 0 if index else _outwards(lines[0])
    widths = [LETTER_WIDTH * len(str(line.get_label())) for line in lines]
    heights = _apart([(x, y + 11.0 * way) for x, y in points], widths, way)
    for line, anchor, (_, y), height in zip(lines, anchors, points, heights, strict=True):
        panel.annotate(
            line.get_label(),
            anchor,
            xytext=(0.0 if way else 7.0, height - y),
            textcoords="offset points",
            color=line.get_color(),
            fontsize=9,
            ha="center" if way else "left",
            va="center",
            annotation_clip=False,
        )


def _outwards(line: Line2D) -> int:
    """Return the way from a line's start to where it never goes: 1 for up, -1 for down."""
    heights: Any = line.get_ydata()
    return 1 if heights[-1] < heights[0] else -1


def _apart(points: list[tuple[float, float]], widths: list[float], way: int) -> list[float]:
    """Return heights at which names of these widths at these points do not touch.

    Names move up (way 1), down (-1), or both ways, as little as can be (0).
    """
    heights = [y for _, y in points]
    order = sorted(range(len(points)), key=lambda number: heights[number])
    rise = (1 + way) / 2
    for _ in range(100):  # pushing one pair apart may push another together
        for position, low in enumerate(order):
            for high in order[position + 1 :]:
                overlap = LINE_GAP - (heights[high] - heights[low])
                beside = abs(points[high][0] - points[low][0]) > (widths[high] + widths[low]) / 2
                if overlap > 0 and not beside:
                    heights[high] += overlap * rise
                    heights[low] -= overlap * (1 - rise)
    return heights


def save(records: list[Record], path: Path) -> None:
    """Draw the records into a PNG file."""
    figure = draw(records)
    write_whole(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the curves of records written by train.py --json.")
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    chosen = parser.parse_args()
    save([json.loads(path.read_text()) for path in chosen.records], chosen.out)
    print(f"wrote {chosen.out}")


if __name__ == "__main__":
    main()
