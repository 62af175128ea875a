"""The tables and the picture of benchmarks/recipes.py: each method against no compression, task by task."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes

from benchmarks.figures import COLOURS, GREY, dress, new_figure, save
from benchmarks.results import Record

NEAR = 1.0  # per cent within which a method learns like no compression
WORST = -12.0  # left end of the axis, in per cent
NEARLY_WORST = -11.0  # what lies further to the left is written, not drawn
NOTES = """\
Per cent of the held-out loss, or of the accuracy where tasks are so marked; worse is left. A dot for each seed against
no compression with the same seed, a bar at the mean over seeds; shaded: within {near:g} %. 4 ranks in one process,
learning rates chosen for no compression. Grey dots: the seeds of no compression against their mean."""


class Results:
    """The records of one task: those with the settings of its latest training without compression."""

    def __init__(self, records: Sequence[Record], task: str) -> None:
        mine = [record for record in records if record["task"] == task]
        base = [record for record in mine if record["name"] == "none"]
        recipe = (base or mine)[-1]["recipe"]
        self.task, self.metric = task, recipe["metric"]
        self.records = [record for record in mine if record["recipe"] == recipe]
        self.base = {record["seed"]: record for record in self.records if record["name"] == "none"}

    def of(self, method: str) -> list[Record]:
        return sorted((record for record in self.records if record["name"] == method), key=lambda one: one["seed"])

    def value(self, record: Record) -> float | None:
        """Return the result of a training; None if it failed or diverged."""
        return None if record.get("loss") is None else float(record[self.metric])

    def against(self, values: Sequence[float], bases: Sequence[float]) -> float:
        """Return by how many per cent values are better on average; worse is minus."""
        ratio = mean(values) / mean(bases) - 1
        return 100 * (ratio if self.metric == "accuracy" else -ratio)

    def pairs(self, method: str) -> list[tuple[float, float]]:
        """Return each seed's result with that of no compression, where there are both."""
        both = [(self.value(record), self.base.get(record["seed"])) for record in self.of(method)]
        found = [(value, self.value(base)) for value, base in both if value is not None and base is not None]
        return [(value, base) for value, base in found if base is not None]

    def broken(self, method: str) -> list[Record]:
        return [record for record in self.of(method) if self.value(record) is None]

    def difference(self, method: str) -> float | None:
        """Return the mean difference in per cent as it is shown; None if a training failed, or nothing is compared."""
        pairs = self.pairs(method)
        if not pairs or self.broken(method):
            return None
        return round(self.against(*zip(*pairs, strict=True)), 1) + 0.0  # no minus before a zero


def names(records: Sequence[Record], field: str) -> list[str]:
    return list(dict.fromkeys(record[field] for record in records))


# ---- tables -----------------------------------------------------------------------------------


def markdown(records: Sequence[Record]) -> str:
    """Return the tables: results, bytes, and what failed."""
    tasks = [Results(records, task) for task in names(records, "task")]
    methods = [name for name in names(records, "name") if name != "none"]
    head = ["task", "measure", "`none`", *(f"`{method}`" for method in methods)]
    rows = [[one.task, one.metric, _base(one), *(_difference(one, method) for method in methods)] for one in tasks]
    text = _rows(head, rows) + "\n"
    for method in methods:
        found = [difference for one in tasks if (difference := one.difference(method)) is not None]
        near = sum(difference >= -NEAR for difference in found)
        text += f"\n- `{method}`: at most {NEAR:g} % worse than `none` in {near} of {len(tasks)} tasks"
    text += "\n\n" + _rows(
        ["task", *head[3:]], [[one.task, *(_bytes(one, method) for method in methods)] for one in tasks]
    )
    failures = [record for one in tasks for method in ["none", *methods] for record in one.broken(method)]
    if failures:
        text += "\n\n" + _rows(["failed", "seed", "why"], [_failure(record) for record in failures])
    return text


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _base(one: Results) -> str:
    values = [value for record in one.base.values() if (value := one.value(record)) is not None]
    return f"{mean(values):.4f} ({min(values):.4f} to {max(values):.4f})" if values else "-"


def _difference(one: Results, method: str) -> str:
    if one.broken(method):
        return "**failed**" if any("failed" in record for record in one.broken(method)) else "**diverged**"
    difference = one.difference(method)
    if difference is None:
        return "-"
    said = f"{difference:+.1f} %"
    seeds = [f"{one.against([value], [base]):+.1f}" for value, base in one.pairs(method)]
    said = f"**{said}**" if difference < -NEAR else said
    return f"{said} ({', '.join(seeds)})" if len(seeds) > 1 else said


def _bytes(one: Results, method: str) -> str:
    found = [record["bytes_dense"] / record["bytes_sent"] for record in one.of(method) if record.get("bytes_sent")]
    return f"{mean(found):.1f}" if found else "-"


def _failure(record: Record) -> list[str]:
    why = record.get("failed") or "the loss is no finite number"
    return [f"{record['task']}, `{record['name']}`", str(record["seed"]), why.replace("|", "\\|")]


# ---- the picture ------------------------------------------------------------------------------


def draw(records: Sequence[Record], stem: Path) -> list[Path]:
    """Draw a panel for each method, in which each task has a row."""
    tasks = [Results(records, task) for task in names(records, "task")]
    methods = [name for name in names(records, "name") if name != "none"]
    if not methods:
        raise ValueError("there is nothing beside none in the file yet, so there is nothing to draw")
    title = "Eight recipes: how methods learn, against no compression"
    figure, panels = new_figure(title, NOTES.format(near=NEAR), 1.3 + 1.55 * len(methods), 3.4, columns=len(methods))
    for panel, method in zip(panels, methods, strict=True):
        _panel(panel, method, tasks)
    labels = [one.task + (" (accuracy)" if one.metric == "accuracy" else "") for one in tasks]
    panels[0].set_yticks(range(len(tasks)), labels, fontsize=9)
    return save(figure, stem)


def _panel(panel: Axes, method: str, tasks: Sequence[Results]) -> None:
    panel.axvspan(-NEAR, NEAR, color="#E8EEF4", zorder=0)
    panel.axvline(0, color=GREY, linewidth=0.8)
    for place, one in enumerate(tasks):
        bases = [value for record in one.base.values() if (value := one.value(record)) is not None]
        spread = [one.against([value], bases) for value in bases]
        panel.scatter(spread, [place + 0.22] * len(spread), s=9, color=GREY, alpha=0.6, linewidths=0)
        difference = one.difference(method)
        if difference is None and not one.broken(method):
            continue
        seeds = [one.against([value], [base]) for value, base in one.pairs(method)]
        if difference is None or min(difference, *seeds) < NEARLY_WORST:
            said = "failed" if difference is None else f"{difference:.0f} %"
            panel.annotate(
                f"\u2190 {said}", (WORST, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8
            )
            continue
        panel.scatter(seeds, [place] * len(seeds), s=14, color=COLOURS[1], alpha=0.7, linewidths=0)
        panel.plot([difference] * 2, [place - 0.3, place + 0.3], color=COLOURS[2], linewidth=2)
    panel.set_title(method, fontsize=9)
    panel.set_xlim(WORST, -0.7 * WORST)
    panel.set_ylim(len(tasks) - 0.4, -0.6)
    panel.set_yticks(range(len(tasks)), [""] * len(tasks))
    panel.set_xticks([-10, -5, 0, 5])
    panel.set_xlabel("per cent")
    panel.tick_params(axis="y", length=0)
    dress(panel, "x")
