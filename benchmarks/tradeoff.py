r"""What sparsity and communication delay cost in accuracy, and what they save in bytes: sparse binary compression.

    python benchmarks/tradeoff.py --keep tradeoff.jsonl --plot docs/figures/sparsity-delay.png

Trains in update mode with every density under every delay, density 1 being `none`: real jobs of benchmarks/quality.py.
With `--keep` a training that has a line in that file is not done again, so the table can be measured piece by piece;
`--draw-only` draws what is there. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import quality  # noqa: E402
from benchmarks.horovodrun import JobFailed  # noqa: E402

Cell = tuple[float, int]  # density and delay


def main() -> None:
    chosen = arguments()
    try:
        found = measured(chosen)
    except JobFailed as failure:
        sys.exit(f"tradeoff.py: {failure}")
    print(table(found, chosen))
    if chosen.plot:
        draw(found, chosen, chosen.plot)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=("digits", "text", "lstm"), default="digits")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--densities", default="1,0.1,0.01,0.001")
    parser.add_argument("--delays", default="1,5,25")
    parser.add_argument("--lr", type=float, help="default: the task's own")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one job")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "tradeoff")
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="JSON lines of training runs that need not be repeated"
    )
    parser.add_argument("--draw-only", action="store_true", help="train nothing")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=".png or .svg")
    parser.set_defaults(shards="even", optimizer=None, beta2=None, lr_schedule="constant", one_process=False)
    return parser.parse_args(argv)


def cells(chosen: argparse.Namespace) -> list[Cell]:
    """Return all pairs of a density and a delay, those that send least last."""
    delays = [int(word) for word in chosen.delays.split(",")]
    return [(float(density), delay) for density in chosen.densities.split(",") for delay in delays]


def words(cell: Cell) -> list[str]:
    """Return the run of a cell, as benchmarks/quality.py takes it."""
    density, delay = cell
    method = ["none"] if density == 1 else ["sparse_binary", f"density={density:g}"]
    return [*method, "--update-mode", "--delay", str(delay)]


def measured(chosen: argparse.Namespace) -> dict[Cell, tuple[float, float]]:
    """Return the mean result of every cell, and how many times fewer bytes than float32 it sent."""
    found = {}
    for cell in cells(chosen):
        records = [record for seed in chosen.seeds.split(",") if (record := _record(cell, int(seed), chosen))]
        if finals := [record["final"] for record in records if record["final"] is not None]:
            found[cell] = mean(finals), float(records[0]["bytes_ratio"].rstrip("x"))
    return found


def _record(cell: Cell, seed: int, chosen: argparse.Namespace) -> dict[str, Any] | None:
    return (quality.kept if chosen.draw_only else quality.trained)(words(cell), seed, chosen)


def table(found: dict[Cell, tuple[float, float]], chosen: argparse.Namespace) -> str:
    """Return a Markdown table: a row for each density, a column for each delay."""
    delays = sorted({delay for _, delay in found})
    rows = [f"| density | {' | '.join(f'delay {delay}' for delay in delays)} |", "|---" * (1 + len(delays)) + "|"]
    for density in sorted({density for density, _ in found}, reverse=True):
        inside = [found.get((density, delay)) for delay in delays]
        texts = [f"{cell[0]:.4f} ({cell[1]:,.0f} x)" if cell else "-" for cell in inside]
        rows.append(f"| {f'{density:g}' if density < 1 else '1 (`none`)'} | {' | '.join(texts)} |")
    return "\n".join(rows)


def draw(found: dict[Cell, tuple[float, float]], chosen: argparse.Namespace, path: Path) -> None:
    """Draw results over bytes saved, a line for each delay."""
    from matplotlib.lines import Line2D

    from benchmarks.figures import COLOURS, dress, name_lines, new_figure, save_as

    number = len(chosen.seeds.split(","))
    markers = dict(zip(sorted({density for density, _ in found}, reverse=True), cycle("os^Dv*"), strict=False))
    figure, (panel,) = new_figure(
        "Fewer bytes by sparsity, or by local steps",
        f"sparse binary compression in update mode; {chosen.task}, {chosen.ranks} ranks, {chosen.steps} local steps, "
        f"{number} seed{'s' if number > 1 else ''}",
        width=8.0,
        height=3.6,
    )
    for colour, delay in zip(COLOURS[1:], sorted({delay for _, delay in found}), strict=False):
        mine = sorted((ratio, result, density) for (density, at), (result, ratio) in found.items() if at == delay)
        xs, ys, _ = zip(*mine, strict=True)
        name = f"{delay} local steps" if delay > 1 else "every step"
        panel.plot(xs, ys, color=colour, label=name, linewidth=1.4)
        for x, y, density in mine:
            panel.plot(x, y, color=colour, marker=markers[density], markersize=6, label="_point")
    shapes = [
        Line2D([], [], color="#444444", linestyle="", marker=marker, label=f"{density:g}")
        for density, marker in markers.items()
    ]
    panel.legend(handles=shapes, title="density", loc="lower left", frameon=False, fontsize=8, title_fontsize=8)
    panel.set_xscale("log")
    panel.set_xlabel("float32 bytes / bytes sent")
    panel.set_ylabel("accuracy" if chosen.task == "digits" else "loss")
    dress(panel)
    figure.draw_without_rendering()
    name_lines(panel)
    save_as(figure, path)


if __name__ == "__main__":
    main()
