"""Predictions as plain data, and as text for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...codecs.by_step import described
from ..common import milliseconds, table
from .prediction import PLAIN, Case, Cell, Found, Timeline, name_of

_MOST_ROWS = 40  # buckets that are listed; --json has all
#: A method whose step is not this much shorter than without compression does not pay.
LEAST_GAIN = 1.05
NOTES = """\
ready, begin, end, decoded: milliseconds after the start of the step: the last gradient is ready; encoding and exchange
begin and end; the result is ready. MB sent: by one rank in one step. T1/TN: compute / step, the scaling factor."""


# ---- plain data -------------------------------------------------------------------------------


def document(case: Case, found: Found, bare: Found, saved: str | None = None) -> dict[str, Any]:
    """Return the predictions of one world as plain data; seconds and bytes."""
    return {
        "bench": "plan",
        **case_document(case),
        "ranks": case.world.ranks,
        "method": described(found.codec),
        "timelines": [timeline_document(case, one, found.codec.name) for one in found.timelines],
        "uncompressed": [timeline_document(case, one, PLAIN) for one in bare.timelines],
        "buckets": buckets_document(found.best),
        "plan": found.best.plan.document(),
        "saved": saved,
    }


def case_document(case: Case) -> dict[str, Any]:
    """Return the model and the job that were predicted for, as in a result file."""
    world = case.world
    return {
        "model": case.table.model,
        "parameters": case.table.count,
        "tensors": len(case.table.tensors),
        "rate_bytes_per_second": world.link.rate,
        "latency_seconds": world.link.latency,
        "cores_per_rank": world.cores,
        "compute_seconds": case.compute,
    }


def timeline_document(case: Case, one: Timeline, method: str) -> dict[str, Any]:
    """Return the prediction for one schedule, as in a result file."""
    return {
        "method": method,
        "schedule": one.schedule,
        "buckets": len(one.slots),
        "step_seconds": one.step,
        "scaling": case.compute / one.step,
        "bytes_sent": round(one.sent),
    }


def buckets_document(one: Timeline) -> list[dict[str, Any]]:
    """Return what happens to each bucket and when, as in a result file."""
    return [
        {
            "tensors": [tensor.name for tensor in slot.bucket.tensors],
            "elements": slot.bucket.count,
            "bytes_sent": round(slot.sent),
            "collective": slot.collective,
            "ready_seconds": slot.ready,
            "begin_seconds": slot.begin,
            "end_seconds": slot.end,
            "decoded_seconds": slot.decoded,
        }
        for slot in one.slots
    ]


def cells_document(case: Case, found: Sequence[Cell]) -> dict[str, Any]:
    """Return the predictions for several worlds as plain data."""
    worlds = []
    for cell in found:
        told: dict[str, Any] = {"problem": cell.problem}
        if cell.timeline:
            told = timeline_document(case, cell.timeline, cell.method) | {"unbiased_or_conserving": cell.lossless}
        worlds.append({"method": cell.method, "ranks": cell.ranks, "hosted": cell.hosted} | told)
    return {"bench": "plan", **case_document(case), "worlds": worlds}


# ---- text -------------------------------------------------------------------------------------


def place_text(case: Case, ranks: str) -> str:
    """Return in words what is planned for."""
    world, bits = case.world, 8 * case.world.link.rate
    rate = f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
    cores = "" if world.cores >= 1 else f", {world.cores:g} cores per rank"
    return (
        f"{case.table.model} ({case.table.count:,} parameters in {len(case.table.tensors)} tensors), {ranks} ranks, "
        f"{rate}, latency {milliseconds(world.link.latency)} ms{cores}, compute {milliseconds(case.compute)} ms"
    )


def text(case: Case, found: Found, bare: Found) -> str:
    """Return the buckets of the best plan, and the steps with every schedule."""
    name = name_of(found.codec)
    pairs = [(name, one) for one in found.timelines]
    if found.codec.name != PLAIN:
        pairs += [(f"{PLAIN} (float32)", one) for one in bare.timelines]
    steps = [
        [
            method, one.schedule, str(len(one.slots)), milliseconds(one.step), f"{case.compute / one.step:.2f}",
            milliseconds(one.step - case.compute), f"{one.sent / 1e6:.3g}",
        ]
        for method, one in pairs
    ]  # fmt: skip
    parts = [
        place_text(case, str(case.world.ranks)),
        f"\nThe best buckets for {name}:",
        buckets(found.best),
        f"{NOTES}\n",
        table(("method", "schedule", "buckets", "step ms", "T1/TN", "exposed ms", "MB sent"), steps, left=2),
    ]
    if found.share < 0.999:
        parts.append(
            f"Step times are averages: {1 - found.share:.1%} of the rounds are of another kind, such as full "
            "precision. Buckets and MB sent are those of the other rounds."
        )
    return "\n".join([*parts, verdict(found, bare)])


def buckets(one: Timeline) -> str:
    """Return the table of buckets; of many, the first and the last."""
    rows = []
    for number, slot in enumerate(one.slots):
        tensors = slot.bucket.tensors
        names = tensors[0].name if len(tensors) == 1 else f"{tensors[0].name} .. {tensors[-1].name}"
        names = names if len(names) <= 60 else f"{names[:28]}...{names[-29:]}"
        times = (slot.ready, slot.begin, slot.end, slot.decoded)
        rows.append([
            str(number), names, str(len(tensors)), f"{slot.bucket.count:,}", f"{slot.sent / 1e6:.3g}",
            slot.collective, *(f"{1e3 * seconds:.1f}" for seconds in times),
        ])  # fmt: skip
    left_out = ""
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
        gap = ["...", f"{len(rows) - 2 * half} more", *[""] * (len(rows[0]) - 2)]
        rows, left_out = [*rows[:half], gap, *rows[-half:]], "\n(--json lists all buckets)"
    headings = ("bucket", "tensors", "number", "elements", "MB sent", "by", "ready", "begin", "end", "decoded")
    return table(headings, rows, left=2) + left_out


def verdict(found: Found, bare: Found) -> str:
    """Return which is best, and whether the method pays."""
    best, name = found.best, name_of(found.codec)
    usual = next((one for one in found.timelines if one.schedule == "size:25MB"), best)
    same = min(found.timelines[1:], key=lambda one: one.step, default=best)
    said = f'Best: schedule="{best.schedule}", {milliseconds(best.step)} ms a step'
    if same.step < 1.01 * best.step:
        said += f'; "{same.schedule}" is as good'
    elif usual is not best:
        said += f', {usual.step / best.step:.2f} times as fast as "{usual.schedule}"'
    if found.codec.name == PLAIN:
        return f"{said}."
    times = bare.best.step / best.step
    if times < LEAST_GAIN:
        plain = milliseconds(bare.best.step)
        gains = f"gains less than {LEAST_GAIN - 1:.0%} here" if times > 1 else "does not pay here"
        return f"{said}.\n{name} {gains}: without compression a step takes {plain} ms."
    return f"{said}.\n{name} pays here: a step is {times:.1f} times as fast as without compression."


# ---- several worlds ---------------------------------------------------------------------------


def worlds_text(case: Case, found: Sequence[Cell]) -> str:
    """Return steps and scaling factors by method and number of ranks, and what to use for each."""
    numbers = sorted({cell.ranks for cell in found})
    rows: dict[str, list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for cell in found:
        row, said = rows.setdefault(cell.method, [cell.method, *[""] * len(numbers)]), "cannot"
        if cell.timeline:
            said = f"{milliseconds(cell.timeline.step)} ({case.compute / cell.timeline.step:.2f})"
        else:
            refused.setdefault((cell.method, cell.problem), []).append(str(cell.ranks))
        row[1 + numbers.index(cell.ranks)] = said
    parts = [
        place_text(case, ", ".join(map(str, numbers))),
        "Step in milliseconds and scaling factor T1/TN, each with the buckets that are best there:\n",
        table(["method", *(f"{number} ranks" for number in numbers)], list(rows.values())),
        *(f"cannot: {name} on {', '.join(at)} ranks: {why}" for (name, why), at in refused.items()),
        "",
        *(advice(found, number) for number in numbers),
        "",
        "Methods also differ in how well they learn: docs/choosing.md compares them.",
        "Predictions are for ranks with a link each, all at the same rate.",
    ]
    if any(cell.hosted for cell in found):
        parts.append('Those of "hierarchical" are for hosts with one link each, which their ranks share.')
    return "\n".join(parts)


def advice(found: Sequence[Cell], ranks: int) -> str:
    """Return the fastest methods at this number of ranks, of all and of those that lose nothing."""
    able = [(cell.timeline.step, cell) for cell in found if cell.ranks == ranks and cell.timeline]
    able.sort(key=lambda one: one[0])
    if not able:
        return f"{ranks} ranks: none of these methods can run"
    told = [f"{cell.method} ({milliseconds(step)} ms)" for step, cell in able]
    if len(told) == 1:
        said = f"only {told[0]} can run"
    else:
        said = f"{told[0]} is the fastest, then {told[1]}{f' and {told[2]}' if told[2:] else ''}"
    keeping = next((name for name, (_, cell) in zip(told, able, strict=True) if cell.lossless), told[0])
    if keeping != told[0]:
        said += (
            ". Of those that lose nothing over the steps, as they are unbiased or send later what they leave out: "
            f"{keeping}"
        )
    return f"{ranks} ranks: {said}."
