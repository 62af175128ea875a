"""Shows what benchmarks/quality.py measured: as Markdown tables, and as one plot of all methods.

    python -m benchmarks.figures_quality all.jsonl --plot quality.svg

Reads the JSON lines of any number of runs. Of two records with the same task, shards and method the last one
counts. Digits are compared in points of accuracy, text in per cent of the loss; worse is minus.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes

from benchmarks.figures import COLOURS, GREY, dress, new_figure, save
from benchmarks.results import Record

TASKS = {
    "digits": "digits: points of accuracy",
    "text": "text: per cent of the loss",
    "lstm": "lstm: per cent of the loss",
    "words": "words: per cent of the loss",
}
#: How much worse a method with error feedback may be.
LIMITS = {"digits": 1.5, "text": 5.0, "lstm": 5.0, "words": 5.0}
WORST = {"digits": -12.0, "text": -45.0, "lstm": -45.0, "words": -45.0}  # left end of the axis
NOTES = """\
One dot for each seed, a bar at their mean, against no compression with the same seeds;
shaded: within {digits} points and {text:.0f} % of no compression.
4 ranks, 300 steps, equal learning rate for all methods. The number after a name: how many times fewer bytes than
float32 all-reduce a rank sent, headers and full-precision rounds included (on text, else on digits)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines of benchmarks/quality.py")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw into FILE.svg and FILE.png")
    chosen = parser.parse_args()
    records = read(chosen.files)
    if not records:
        sys.exit("figures_quality: these files hold no records of benchmarks/quality.py; give --json to it")
    for task, shards in dict.fromkeys((record["task"], record["shards"]) for record in records):
        print(f"{task}, {shards} shards\n\n{markdown(group(records, task, shards))}\n")
    if chosen.plot:
        print(*draw([record for record in records if record["shards"] == "even"], chosen.plot))


def read(files: Sequence[Path]) -> list[Record]:
    """Return the records in the order in which methods first occur."""
    found: dict[tuple[str, str, str], Record] = {}
    for path in files:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record.get("bench") == "quality" and record["name"] != "header":
                found[record["task"], record["shards"], record["name"]] = record
    return list(found.values())


def group(records: Sequence[Record], task: str, shards: str) -> list[Record]:
    return [record for record in records if (record["task"], record["shards"]) == (task, shards)]


def against(value: float, base: float, task: str) -> float:
    """Return points of accuracy or per cent of the loss, minus infinity for a run that diverged."""
    if not math.isfinite(value):
        return -math.inf
    return 100 * (value - base) if task == "digits" else 100 * (base - value) / base


def base_of(records: Sequence[Record], seeds: int) -> float:
    """Return the result without compression, the mean of so many seeds: a record is compared with its own.

    Raises:
        ValueError: it was not measured.
    """
    for record in records:
        if record["name"] == "none":
            return mean(record["finals"][:seeds])
    raise ValueError(f"no record of the method none for {records[0]['task']}, {records[0]['shards']} shards")


def markdown(records: Sequence[Record]) -> str:
    unit = " points" if records[0]["task"] == "digits" else " %"
    lines = ["| method and options | mean | against none | each seed | float32 / bytes |", "|---|---|---|---|---|"]
    for record in records:
        base = base_of(records, len(record["finals"]))
        difference = against(record["mean"], base, record["task"])
        said = (
            ""
            if record["name"] == "none"
            else f"{difference:+.2f}{unit}"
            if unit != " %"
            else f"{difference:+.1f}{unit}"
        )
        if difference < -LIMITS[record["task"]]:
            said = f"**{said}**"
        seeds = " ".join(f"{value:.4f}" for value in record["finals"])
        ratio = str(record["bytes_ratio"]).removesuffix("x")
        lines.append(f"| `{record['name']}` | {record['mean']:.4f} | {said} | {seeds} | {ratio} |")
    return "\n".join(lines)


def draw(records: Sequence[Record], path: Path) -> list[Path]:
    """Draw all methods below each other, a panel for each task."""
    tasks = [task for task in TASKS if group(records, task, "even")]
    names = list(dict.fromkeys(record["name"] for record in records if record["name"] != "none"))
    ratios = {one["name"]: one["bytes_ratio"] for one in sorted(records, key=lambda one: one["task"] == "text")}
    title = "How methods learn, against no compression"
    notes = NOTES.format(**LIMITS)
    figure, panels = new_figure(title, notes, 10.5, 0.9 + 0.25 * len(names), columns=len(tasks))
    for panel, task in zip(panels, tasks, strict=True):
        _panel(panel, task, names, group(records, task, "even"))
        panel.set_yticks(range(len(names)), [""] * len(names))
    panels[0].set_yticklabels([f"{name}  1/{str(ratios[name]).removesuffix('x')}" for name in names], fontsize=8.5)
    return save(figure, path.with_suffix(""))


def _panel(panel: Axes, task: str, names: Sequence[str], records: Sequence[Record]) -> None:
    panel.axvspan(-LIMITS[task], LIMITS[task], color="#E8EEF4", zorder=0)
    panel.axvline(0, color=GREY, linewidth=0.8)
    for record in records:
        if record["name"] in names:
            base = base_of(records, len(record["finals"]))
            _row(panel, names.index(record["name"]), [against(v, base, task) for v in record["finals"]], WORST[task])
    panel.set_xlim(WORST[task], 0.35 * -WORST[task])
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.set_xlabel(TASKS[task])
    panel.tick_params(axis="y", length=0)
    dress(panel, "x")


def _row(panel: Axes, place: int, values: Sequence[float], worst: float) -> None:
    middle = mean(values)
    if middle < worst:
        said = f"{middle:.0f}" if math.isfinite(middle) else "diverged"
        panel.annotate(
            f"\u2190 {said}", (worst, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
        return
    panel.scatter(values, [place] * len(values), s=14, color=COLOURS[1], alpha=0.7, linewidths=0)
    panel.plot([middle] * 2, [place - 0.3, place + 0.3], color=COLOURS[2], linewidth=2)


if __name__ == "__main__":
    main()
