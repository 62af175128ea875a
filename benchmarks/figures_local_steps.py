"""Draws what local steps cost and save: the loss of every training that benchmarks/quality.py has kept, over its bytes.

    python -m benchmarks.figures_local_steps kept.jsonl --plot docs/figures/local-steps.png

Reads the file of `quality.py --keep`; trainings of one task, one number of steps and one seed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from benchmarks import quality
from benchmarks.figures import COLOURS, dress, new_figure, save_as
from benchmarks.results import Record

MARKERS = {1: "o", 10: "s", 30: "^"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="of quality.py --keep")
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE", help="draw into this PNG or SVG file")
    chosen = parser.parse_args()
    runs = [run_of(record) for record in quality.read(chosen.file)]
    if not runs:
        sys.exit(f"figures_local_steps: {chosen.file} holds no trainings; give quality.py --keep {chosen.file}")
    draw(runs, chosen.plot)
    print(f"wrote {chosen.plot}")


def run_of(record: Record) -> dict[str, Any]:
    """Return what is drawn of a training: method, local steps, whether it began with exchanges, loss and ratio."""
    words = record["asked"]["words"]
    options = {flag: value for flag, value in pairwise(words) if flag.startswith("--")}
    return {
        "method": " ".join(word for word in words[: _flags(words)]),
        "delay": int(options.get("--local-steps", 1)),
        "start": int(options.get("--warmup-exchanges", 0)),
        "loss": record["final"],
        "ratio": float(record["bytes_ratio"].rstrip("x")),
        "asked": record["asked"],
    }


def _flags(words: Sequence[str]) -> int:
    return next((place for place, word in enumerate(words) if word.startswith("--")), len(words))


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw losses over bytes saved: a colour for each method, a marker for each number of local steps."""
    asked = runs[0]["asked"]
    figure, (panel,) = new_figure(
        "Fewer bytes by local steps",
        f"{asked['task']}, {asked['ranks']} ranks, {asked['steps']} steps, {asked['optimizer']} at {asked['lr']:g}, "
        f"{asked['lr_schedule']}, one seed; outer optimizer with more than one local step; hollow: every step is "
        "exchanged at first",
        width=8.0,
        height=3.8,
    )
    methods = list(dict.fromkeys(run["method"] for run in runs))
    for run in runs:
        colour = COLOURS[methods.index(run["method"]) % len(COLOURS)]
        face = "none" if run["start"] else colour
        marker = MARKERS.get(run["delay"], "D")
        panel.plot(run["ratio"], run["loss"], marker, color=colour, markerfacecolor=face, markersize=8)
    delays = sorted({run["delay"] for run in runs})
    handles = [Line2D([], [], color=COLOURS[n % len(COLOURS)], label=name) for n, name in enumerate(methods)]
    handles += [
        Line2D(
            [],
            [],
            color="#444444",
            linestyle="",
            marker=MARKERS.get(delay, "D"),
            label=f"{delay} local steps" if delay > 1 else "every step",
        )
        for delay in delays
    ]
    panel.legend(handles=handles, frameon=False, fontsize=8, loc="upper left")
    panel.set_xscale("log")
    panel.set_xlabel("float32 bytes / bytes sent")
    panel.set_ylabel("held-out loss")
    dress(panel)
    save_as(figure, path)


if __name__ == "__main__":
    main()
