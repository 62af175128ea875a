"""The demo's table: what was measured, and one row for each run."""

from __future__ import annotations

from typing import Any

from target import axis, needed, rate, target, times_better

Record = dict[str, Any]

NOTES = """\
method:          horovod-none is Horovod alone
steps:           of the run
held-out loss:   at the end, one seed; lower is better
to LOSS:         until the held-out loss stays at or below the one that all runs reach (linear between
                 evaluations, which are not counted); in brackets how many times less than the first row
sent/step:       bytes one rank sent, mean of all steps; * computed, since Horovod does not count them
vs fp32 ring:    how many times fewer bytes than an uncompressed ring all-reduce
step:            backward, exchange and optimizer, median (quartiles); exchange: mean, partly behind backward"""


def headings(records: list[Record]) -> tuple[str, ...]:
    loss = f"{target(records):.2f}"
    return (
        "method",
        "steps",
        "held-out loss",
        f"steps to {loss}",
        f"{'seconds' if axis(records) == 'seconds' else 'MB sent'} to {loss}",
        "sent/step",
        "vs fp32 ring",
        "step, ms",
        "exchange, ms",
        "ranks identical",
    )


def rows(records: list[Record]) -> list[tuple[str, ...]]:
    """Return the cells of all runs."""
    loss, what = target(records), axis(records)
    better = [None, *times_better(records, what)[1:]]
    return [row(record, loss, what, ratio) for record, ratio in zip(records, better, strict=True)]


def row(record: Record, loss: float, what: str, better: float | None) -> tuple[str, ...]:
    """Return the cells of one run.

    Args:
        loss: to be reached.
        what: is counted until then, "seconds" or "bytes_sent".
        better: how many times less of it than the first run; None for that one.
    """
    config, stats = record["config"], record["stats"]
    amount, steps = needed(record, loss, what), needed(record, loss, "step")
    return (
        config["method"],
        str(config["steps"]),
        result(record),
        "-" if steps is None else f"{steps:.0f}",
        "-" if amount is None else quantity(amount, what) + (f" ({better:.1f}x)" if better else ""),
        sent_per_step(stats),
        ratio(stats),
        step_time(record["step_seconds"]),
        milliseconds(record["exchange_seconds_per_step"]),
        "yes" if record["ranks_identical"] else "NO",
    )


def render(records: list[Record]) -> str:
    """Return heading, table and notes as text."""
    cells = [headings(records), *rows(records)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_line(line, widths) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([what(records[0]) + "\n", *lines, "", NOTES])


def what(record: Record) -> str:
    """Return what was trained, where."""
    config = record["config"]
    schedule = " with warm-up and cosine" if config.get("lr_schedule") == "cosine" else ""
    rates = f"{config['optimizer'].capitalize()}, learning rate {config['lr']:g}{schedule}, seed {config['seed']}"
    return f"{config['task']}, {config['parameters'] / 1e6:.2g} million parameters, {rates}; {where(record)}"


def where(record: Record) -> str:
    """Return the ranks and their link, as measured."""
    config = record["config"]
    ranks = f"{config['world']} Horovod ranks"
    if not rate(record):
        return f"{ranks} on one machine, {config['cores']} cores"
    return f"{ranks} on {record['place']['hosts']} hosts with {link(record)} links, emulated on {config['cores']} cores"


def link(record: Record) -> str:
    """Return the rate of the links, as people write it."""
    bits = rate(record) or 0.0
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(
        [cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]
    )


def result(record: Record) -> str:
    loss = record["final"]["loss"]
    return "diverged" if loss is None else f"{loss:.3f} nats/char"


def quantity(amount: float, what: str) -> str:
    return f"{amount:.1f}" if what == "seconds" else f"{amount / 1e6:.1f}"


def sent_per_step(stats: dict[str, Any]) -> str:
    mark = "*" if stats.get("bytes_computed") else ""
    return size(stats["bytes_sent"] / stats["steps"]) + mark if stats["steps"] else "-"


def size(count: float) -> str:
    """Return a number of bytes in the unit that leaves a short number."""
    for unit in ("B", "kB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} MB"


def ratio(stats: dict[str, Any]) -> str:
    return f"{stats['bytes_dense'] / stats['bytes_sent']:.1f}x" if stats["bytes_sent"] else "-"


def step_time(spread: dict[str, float] | None) -> str:
    if spread is None:
        return "-"
    median, low, high = (1000 * spread[key] for key in ("median", "q1", "q3"))
    return f"{median:.0f} ({low:.0f}-{high:.0f})"


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f}"
