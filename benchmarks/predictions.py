"""Compares predicted steps with measured ones, on networks and worlds that the model was not fitted to.

    python -m benchmarks.predictions --where lab --json all.json --plot plots

Steps are measured as benchmarks.step does, for every number of ranks and every rate. In one or few of these cells
(--fit) two numbers are fitted, the same for all methods: what the processor's measured seconds are to be multiplied by,
and what a message costs. All other cells are predicted with them, and not looked at before. Hosts of the lab share the
cores of this machine, which the model knows as cores per rank.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import shapes, step
from benchmarks.allreduce import full_name, words
from benchmarks.bandwidth import NOTHING, label
from benchmarks.lab import LabError
from benchmarks.launch import open_launcher
from benchmarks.peers.names import parse
from benchmarks.results import Record, append_json, header, milliseconds, processor, read_json, table
from horovod_compress.cli.plan.network import Link
from horovod_compress.cli.plan.parse import rate, seconds
from horovod_compress.cli.plan.prediction import Predictor, World
from horovod_compress.codecs import registry
from horovod_compress.errors import ConfigError
from horovod_compress.options import Options

METHODS = "none,marsit,topk density=0.01,global_qsgd"
SCHEDULES = "size:25MB,layerwise"
#: What is tried in the fit: factors of the processor's seconds, and seconds of a message.
NEAR = 0.2  # a prediction that is useful
PACES = tuple(2 ** (exponent / 4) for exponent in range(-4, 17))
MESSAGES = tuple(10e-6 * 2 ** (exponent / 2) for exponent in range(17))
COLUMNS = ("ranks", "rate", "method", "fitted", "model ms", "error", "predicted ms", "error", "measured ms [q1-q3]")
NOTES = """\
model:     with the estimates of the package, without any fit
predicted: with what was fitted to the cells marked *
error:     predicted / measured - 1; compute is simulated by sleeping, slowest rank, median of the steps"""


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.predictions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--where", choices=("lab",), default="lab", help="the network lab, whose rates are known")
    parser.add_argument(
        "--model", default="resnet50", help=f"{', '.join(shapes.models())}, or a CSV file of the same form"
    )
    parser.add_argument("--compute-ms", type=float, default=300.0, help="compute time of a step (default 300)")
    parser.add_argument("--methods", default=METHODS, help=f"methods, separated by commas (default {METHODS})")
    parser.add_argument("--schedules", default=SCHEDULES, help=f"schedules of each method (default {SCHEDULES})")
    parser.add_argument("--ranks", default="2,3,4", help="(default 2,3,4)")
    parser.add_argument("--rates", default="1gbit,500mbit,200mbit", help="(default 1gbit,500mbit,200mbit)")
    parser.add_argument("--fit", default="2x1gbit", help="cells to fit the model to, RANKSxRATE (default 2x1gbit)")
    parser.add_argument("--latency", default="100us", help="latency of a message in the lab (default 100us)")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each contestant (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots as SVG and PNG files to DIR")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="show FILE's records again")
    chosen = parser.parse_args(argv)
    try:
        _read(chosen)
    except (ValueError, ConfigError) as error:
        parser.error(str(error))
    return chosen


def _read(chosen: argparse.Namespace) -> None:
    shapes.load(chosen.model)
    ranks, chosen.rates = [int(word) for word in words(chosen.ranks)], words(chosen.rates)
    chosen.cells = list(itertools.product(ranks, chosen.rates))
    chosen.fit = [(int(number), text) for number, _, text in (word.partition("x") for word in words(chosen.fit))]
    for text in [text for _, text in chosen.cells]:
        rate(text)
    if missing := [cell for cell in chosen.fit if cell not in chosen.cells]:
        raise ValueError(f"--fit names {missing[0]}, which is not among --ranks and --rates")
    if min(ranks) < 2 or chosen.repeat < 1 or chosen.compute_ms <= 0:
        raise ValueError("--ranks must be at least 2, --repeat at least 1, --compute-ms above 0")
    chosen.latency = seconds(chosen.latency)
    chosen.contestants = [
        f"{full_name(method)} schedule={schedule}"
        for method in words(chosen.methods)
        for schedule in words(chosen.schedules)
    ]


# ---- measuring --------------------------------------------------------------------------------


def measure(chosen: argparse.Namespace, failures: list[str]) -> list[Record]:
    """Return a point for every contestant in every cell; what failed is left out and told."""
    points: list[Record] = []
    for ranks, text in chosen.cells:
        given = ["--model", chosen.model, "--compute-ms", str(chosen.compute_ms), "--ranks", str(ranks)]
        given += ["--repeat", str(chosen.repeat), "--methods", ",".join(chosen.contestants)]
        records: list[Record] = []
        try:
            with open_launcher("lab", ranks, text) as launcher:
                if failure := step.measure(launcher, step.arguments(given), records):
                    failures.append(failure)
        except (LabError, ValueError) as error:
            failures.append(f"{ranks} ranks, {text}: {error}")
        points += [_point(record, ranks, text) for record in records if record["name"] != NOTHING]
    return points


def _point(record: Record, ranks: int, text: str) -> Record:
    kept = ("name", "model", "t1_seconds", "median_seconds", "q1_seconds", "q3_seconds", "median_alone_seconds")
    return {"bench": "predictions", "ranks": ranks, "rate": text, **{name: record[name] for name in (*kept, "wrong")}}


# ---- predicting -------------------------------------------------------------------------------


class Method:
    """The points of one method."""

    def __init__(self, name: str, points: Sequence[Record], latency: float) -> None:
        self.name, self.points, self._latency = name, points, latency

    def predict(self, point: Record, pace: float, message: float | None) -> float:
        """Return the step of a point.

        Args:
            pace: what the processor's seconds are multiplied by.
            message: processor's seconds of a message; None for the package's estimate.
        """
        codec, schedule, exchange = _options(point["name"])
        link = Link(rate(point["rate"]), self._latency)
        link = link if message is None else replace(link, message=message / pace)
        cores = (os.cpu_count() or 1) / point["ranks"]
        world = World(point["ranks"], link, cores, exchange, pace)
        return Predictor(shapes.load(point["model"]), codec, world, point["t1_seconds"]).usual(schedule).step


def fitted(methods: Sequence[Method], cells: Sequence[tuple[int, str]]) -> tuple[float, float | None]:
    """Return pace and seconds of a message with the least squared logarithms of errors in some cells.

    Both are the machine's, not a method's: two numbers for each method would fit these cells and nothing else.
    """
    known = [(m, point) for m in methods for point in m.points if (point["ranks"], point["rate"]) in cells]
    if not known:
        return 1.0, None

    def misfit(pair: tuple[float, float]) -> float:
        return sum(math.log(method.predict(point, *pair) / point["median_seconds"]) ** 2 for method, point in known)

    return min(itertools.product(PACES, MESSAGES), key=misfit)


def _options(name: str) -> tuple[Any, str, str]:
    method, options = parse(name)
    common = {key: options.pop(key) for key in list(options) if key in Options.names()}
    return registry.create(method, **options), common.get("schedule", "size:25MB"), common.get("exchange", "auto")


def compared(points: Sequence[Record], fit: Sequence[tuple[int, str]], latency: float) -> list[Record]:
    """Return the points with predictions and their errors."""
    found = []
    names = dict.fromkeys(_method(point) for point in points)
    methods = [Method(name, [point for point in points if _method(point) == name], latency) for name in names]
    print("fitting", file=sys.stderr, flush=True)
    pace, message = fitted(methods, fit)
    for method in methods:
        for point in method.points:
            model, predicted = method.predict(point, 1.0, None), method.predict(point, pace, message)
            found.append(
                point
                | {
                    "fitted": (point["ranks"], point["rate"]) in fit,
                    "pace": pace,
                    "message_seconds": message,
                    "model_seconds": model,
                    "model_error": model / point["median_seconds"] - 1,
                    "predicted_seconds": predicted,
                    "predicted_error": predicted / point["median_seconds"] - 1,
                }
            )
    return sorted(found, key=lambda point: (point["ranks"], -rate(point["rate"])))


def _method(point: Record) -> str:
    """Return the contestant without its schedule."""
    return " ".join(word for word in point["name"].split() if not word.startswith("schedule="))


# ---- showing ----------------------------------------------------------------------------------


def text(points: Sequence[Record]) -> str:
    rows = [
        [
            str(point["ranks"]), point["rate"], label(point["name"]), "*" if point["fitted"] else "",
            milliseconds(point["model_seconds"]), f"{point['model_error']:+.0%}",
            milliseconds(point["predicted_seconds"]), f"{point['predicted_error']:+.0%}",
            (f"{milliseconds(point['median_seconds'])} "
             f"[{milliseconds(point['q1_seconds'])}-{milliseconds(point['q3_seconds'])}]"),
        ]
        for point in points
    ]  # fmt: skip
    fits = {
        f"processor x {p['pace']:.2f}, message {milliseconds(p['message_seconds'])} ms"
        for p in points
        if p["message_seconds"] is not None
    }
    said = [f"{points[0]['model']}", table(COLUMNS, rows, left=4), NOTES, *sorted(fits)]
    return "\n".join([*said, summary(points)])


def summary(points: Sequence[Record]) -> str:
    """Return how far predictions are off where nothing was fitted."""
    held = [point for point in points if not point["fitted"]]
    if not held:
        return "every cell was fitted to"
    parts = []
    for name, key in (("model", "model_error"), ("predicted", "predicted_error")):
        errors = sorted(abs(point[key]) for point in held)
        near = sum(error <= NEAR for error in errors)
        parts.append(f"{name} {errors[len(errors) // 2]:.0%}, at most {errors[-1]:.0%}, {near} within {NEAR:.0%}")
    return f"error of {len(held)} steps that were not fitted to, median: {'; '.join(parts)}"


def draw(points: Sequence[Record], first: Record, folder: Path) -> list[Path]:
    """Draw predicted against measured steps."""
    from benchmarks.figures import COLOURS, GREY, dress, new_figure, save

    machine = first.get("machine", {})
    cells = ", ".join(sorted({f"{p['ranks']} ranks {p['rate']}" for p in points if p["fitted"]}))
    notes = (
        f"{points[0]['model']} with compute simulated by sleeping; hosts emulated as network namespaces that share "
        f"{machine.get('cores', '?')} cores of {machine.get('processor', 'a processor')}.\nHollow: fitted to "
        f"({cells}). Full: neither these ranks and rate nor the step was used. {summary(points).capitalize()}."
    )
    figure, (panel,) = new_figure("Predicted and measured steps", notes, 7.4, 5.6)
    ends = [1e3 * p[key] for p in points for key in ("predicted_seconds", "median_seconds")]
    low, high = 0.9 * min(ends), 1.1 * max(ends)
    panel.fill_between([low, high], [0.9 * low, 0.9 * high], [1.1 * low, 1.1 * high], color="#E4E6E9", label="±10 %")
    panel.plot([low, high], [low, high], color=GREY, linewidth=0.9, label="equal")
    for number, name in enumerate(dict.fromkeys(_method(p) for p in points)):
        ours, colour = [p for p in points if _method(p) == name], COLOURS[number % len(COLOURS)]
        for fitted in (True, False):
            chosen = [p for p in ours if p["fitted"] is fitted]
            panel.plot(
                [1e3 * p["median_seconds"] for p in chosen], [1e3 * p["predicted_seconds"] for p in chosen],
                "osD^vP"[number % 6], color=colour, markersize=5.5, markerfacecolor="white" if fitted else colour,
                label="_fitted" if fitted else label(name),
            )  # fmt: skip
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(low, high)
    panel.set_ylim(low, high)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_minor_formatter(lambda value, _: f"{value:,.0f}" if str(value)[0] in "235" else "")
    panel.set_xlabel("measured, milliseconds a step")
    panel.set_ylabel("predicted, milliseconds a step")
    panel.legend(loc="upper left", frameon=False, fontsize=8.5)
    dress(panel)
    return save(figure, folder / f"predictions-{points[0]['model']}")


# ---- main -------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    chosen = arguments(argv)
    failures: list[str] = []
    if chosen.source:
        first, *points = read_json(chosen.source)
    else:
        began = time.monotonic()
        print(f"{processor()}, {os.cpu_count()} cores", flush=True)
        first = header("predictions", argv)
        points = compared(measure(chosen, failures), chosen.fit, chosen.latency)
        if chosen.json and points:
            append_json(chosen.json, [first, *points])
        print(f"{time.monotonic() - began:.0f} s in all", file=sys.stderr)
    if points:
        print(f"\n{text(points)}")
    if chosen.plot and points:
        for path in draw(points, first, chosen.plot):
            print(f"wrote {path}")
    if bad := [label(point["name"]) for point in points if point["wrong"]]:
        failures.append(f"wrong results: {', '.join(bad)}")
    for failure in failures:
        print(f"predictions: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
