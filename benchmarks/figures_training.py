"""The plots of the training benchmarks: where a step's time goes, and results against training time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes

from benchmarks import curves, overlap
from benchmarks.bandwidth import NOTHING, label
from benchmarks.figures import COLOURS, GREY, apart, dress, new_figure, save
from benchmarks.figures_allreduce import rate_text, style
from benchmarks.results import Record, milliseconds

COMPUTE, EXPOSED, COMPUTED = "#C9CDD2", COLOURS[2], "#EBB38A"
DASHES = ("-", "--", ":")
LINE_GAP = 24.0  # points; a name may have two lines
NAME_INCHES = 2.0  # kept free for names right of a panel
AXIS = {"accuracy": "held-out accuracy, % of images", "loss": "held-out loss, nats per character"}

# ---- step time --------------------------------------------------------------------------------


def draw_steps(records: Sequence[Record], first: Record, folder: Path) -> list[Path]:
    """Draw bars of the step time of every contestant, split into compute and exposed exchange."""
    shown = overlap.first_groups(records)
    rows = [*shown, *overlap.amortised(shown)]
    one = records[0]
    title = f"{one['model']}, {one['ranks']} ranks, {rate_text(one['place'])}: where the time of a step goes"
    figure, (panel,) = new_figure(title, step_notes(records, first), 9.6, 1.35 + 0.33 * len(rows))
    for place, record in enumerate(rows):
        _step_bar(panel, place, record)
    panel.set_yticks(range(len(rows)), [label(record["name"]) for record in rows], fontsize=9)
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_xlim(0, 1.5 * max(record.get("q3_seconds", _step(record)) for record in rows) * 1000)  # room for words
    panel.set_xlabel("milliseconds; the thin line is from quartile to quartile")
    panel.tick_params(axis="y", length=0)
    dress(panel, "x")
    panel.spines["left"].set_visible(False)
    _key(panel, bool(overlap.amortised(shown)))
    return save(figure, folder / f"step-{one['model']}-{_stem(one)}")


def _step(record: Record) -> float:
    return record.get("median_seconds") or record["computed_seconds"]


def _step_bar(panel: Axes, place: int, record: Record) -> None:
    step, t1 = 1000 * _step(record), 1000 * record["t1_seconds"]
    measured = "median_seconds" in record
    panel.barh(place, min(step, t1), color=COMPUTE, height=0.72)
    if record["name"] != NOTHING:
        panel.barh(place, max(0.0, step - t1), left=t1, color=EXPOSED if measured else COMPUTED, height=0.72)
    end = step
    if measured:
        end = max(step, 1000 * record["q3_seconds"])
        panel.plot([1000 * record["q1_seconds"], end], [place, place], color=GREY, linewidth=1.2)
    panel.annotate(_said(record), (end, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8.5)


def _said(record: Record) -> str:
    words = f"{milliseconds(_step(record))} ms"
    if record["name"] == NOTHING:
        return f"{words} = T1"
    hidden = record.get("hidden_share")
    return f"{words}, T1/TN {record['scaling']:.2f}" + (f", {hidden:.0%} hidden" if hidden is not None else "")


def _key(panel: Axes, computed: bool) -> None:
    parts = [(COMPUTE, "compute (simulated by sleeping)"), (EXPOSED, "exposed exchange (measured)")]
    parts += [(COMPUTED, "the same, computed for K")] if computed else []
    handles = [panel.barh(0, 0, color=colour, label=name) for colour, name in parts]
    panel.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=8.5, borderpad=0
    )


def step_notes(records: Sequence[Record], first: Record) -> str:
    one = records[0]
    powersgd = "\nDDP's PowerSGD: one bucket (several hang over Gloo), so nothing of it hides behind backward."
    return (
        f"Gradients of the real shapes in backward order ({one['parameters']:,} parameters, {one['tensors']} tensors) "
        f"in a real Horovod job; {_where(one['place'], first)}.\n"
        f"Compute is simulated by sleeping {milliseconds(one['compute_seconds'])} ms, which leaves the cores free "
        f"as an accelerator does. Slowest rank, medians of {one['repeats']}, all methods in turns.\n"
        "Marsit: sign rounds only; K: computed for one full-precision round in K. Hidden: share of the exchange alone."
        + (powersgd if any(record["name"].startswith("ddp powersgd") for record in records) else "")
    )


# ---- time to accuracy -------------------------------------------------------------------------


def draw_accuracy(runs: Sequence[Record], first: Record, folder: Path) -> list[Path]:
    """Draw the held-out result against seconds of training: every seed thin, the methods' medians thick."""
    one = runs[0]
    title = f"{one['task']}, {one['ranks']} ranks, {rate_text(one['place'])}: held-out result against training time"
    figure, (panel,) = new_figure(title, accuracy_notes(runs, first), 9.6, 4.6)
    scale = 100.0 if one["metric"] == "accuracy" else 1.0
    used: list[str] = []
    for method in dict.fromkeys(run["name"] for run in runs):
        ours = [run for run in runs if run["name"] == method]
        colour, _ = style(method)
        dash = DASHES[used.count(colour) % len(DASHES)]  # variants of a method share its colour
        used.append(colour)
        for run in ours:
            if points := [(p["seconds"], scale * p["value"]) for p in run["curve"] if p["value"] is not None]:
                panel.plot(*zip(*points, strict=True), dash, color=colour, linewidth=0.7, alpha=0.45, label="_seed")
        if points := [(x, scale * y) for x, y in curves.median_line([run["curve"] for run in ours])]:
            panel.plot(*zip(*points, strict=True), dash, color=colour, linewidth=2.2, label=_short(label(method)))
        _mark(panel, [run["seconds_to_target"] for run in ours], scale * one["target"], colour)
    panel.axhline(scale * one["target"], color=GREY, linewidth=0.9, linestyle=":")
    panel.annotate(
        f"target {scale * one['target']:.4g}",
        (0, scale * one["target"]),
        xycoords=("axes fraction", "data"),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8.5,
        color=GREY,
    )
    panel.set_xlabel("seconds of training, evaluation not counted")
    panel.set_ylabel(AXIS[one["metric"]])
    panel.set_xlim(0, 1.02 * max(run["training_seconds"] for run in runs))
    dress(panel)
    _name_at_the_edge(panel)
    return save(figure, folder / f"accuracy-{one['task']}-{_stem(one)}")


def _name_at_the_edge(panel: Axes) -> None:
    """Name the thick lines right of the panel, where no thin line can run through a name."""
    figure: Any = panel.get_figure()
    drawn: list[Any] = list(panel.get_lines())
    lines = [line for line in drawn if not str(line.get_label()).startswith("_")]
    engine = figure.get_layout_engine()
    left, bottom, width, height = engine.get()["rect"]
    engine.set(rect=(left, bottom, width - NAME_INCHES / figure.get_figwidth(), height))
    figure.canvas.draw()  # the layout must be final before positions are measured
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines]
    points = [y for _, y in panel.transData.transform(ends) * 72 / figure.dpi] if ends else []
    for line, end, y, height in zip(lines, ends, points, apart(points, LINE_GAP), strict=True):
        name = panel.annotate(
            line.get_label(),
            (1, end[1]),
            xycoords=("axes fraction", "data"),
            xytext=(8, height - y),
            textcoords="offset points",
            color=line.get_color(),
            fontsize=9,
            va="center",
            annotation_clip=False,
        )
        name.set_in_layout(False)  # its room is kept already
        panel.plot([end[0], 1e9], [end[1]] * 2, color=line.get_color(), linewidth=0.6, dashes=(1, 4), label="_to name")


def _short(name: str) -> str:
    """Break a name after its method: the options stand below it."""
    return name.replace(" ", "\n", 1) if len(name) > 18 else name


def _mark(panel: Axes, seconds: Sequence[float | None], target: float, colour: str) -> None:
    """Mark when the median seed reaches the target, if all do."""
    reached = [value for value in seconds if value is not None]
    if len(reached) == len(seconds):
        panel.plot([median(reached)], [target], "o", color=colour, markersize=7, label="_reached", zorder=5)


def accuracy_notes(runs: Sequence[Record], first: Record) -> str:
    one, seeds = runs[0], sorted({run["seed"] for run in runs})
    return (
        f"Real training of {one['parameters']:,} parameters with {one['optimizer']}, computed on the processor; "
        f"{_where(one['place'], first)}.\n"
        f"Thin: every seed ({', '.join(map(str, seeds))}); thick: their median, each value with the two before it. "
        f"Dots: median time to the target.\nTarget: {one['target_rule']}."
    )


# ---- words ------------------------------------------------------------------------------------


def _where(place: Record, first: Record) -> str:
    machine = first.get("machine", {})
    where = f"{place['ranks']} ranks on {machine.get('cores', '?')} cores of {machine.get('processor', 'a processor')}"
    if place["launcher"] == "lab":
        return f"{where},\n{place['hosts']} hosts emulated as network namespaces, links limited by tc tbf"
    return f"{where}, {'no network in between' if place['hosts'] == 1 else 'the network that the hosts have'}"


def _stem(record: Record) -> str:
    place = record["place"]
    rate = (place.get("rate") or "unlimited") if place["launcher"] == "lab" else "here"
    return f"{rate}-{place['ranks']}ranks"
