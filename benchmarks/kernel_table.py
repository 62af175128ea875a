"""Measures the cases of the benchmark of kernels in turns, and shows them as a table, as records and as bars."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.kernel_cases import Arrays, Case, by_others, cases
from benchmarks.results import Record, processor, spread
from horovod_compress import ops

DTYPES = ("float32", "bfloat16")
_FEW = 1 << 16  # elements, of which every case can be made at once


@dataclass
class Line:
    """One line of the table: a case by the type of its gradients.

    Attributes:
        cases: with float32 gradients first, and with bfloat16 ones where that moves other bytes.
        wrong: elements that differ from the reference, by type; nothing where there is no reference.
    """

    cases: dict[str, Case]
    wrong: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.cases["float32"].name

    def check(self) -> None:
        self.wrong = {dtype: case.wrong() for dtype, case in self.cases.items() if case.wrong}


def lines_of(count: int, pattern: str) -> list[Line]:
    """Return the lines of the cases whose name contains a word, and of the triad.

    Raises:
        MemoryError, RuntimeError: there is not enough memory.
    """
    lines = [Line({"float32": case}) for case in cases(Arrays(count), pattern)]
    for line, short in zip(lines, cases(Arrays(count, torch.bfloat16), pattern), strict=True):
        if short.bytes_moved != line.cases["float32"].bytes_moved:
            line.cases["bfloat16"] = short
    return lines


def rounds(number: int) -> Iterable[int]:
    """Count, with a progress bar where somebody watches."""
    if sys.stderr.isatty():
        with suppress(ImportError):
            from tqdm import tqdm

            return tqdm(range(number), unit="round", leave=False)
    return range(number)


def measure(every: Sequence[Case], repeat: int) -> None:
    for case in every:
        case.run()
    for _ in rounds(repeat):
        for case in every:
            start = time.perf_counter()
            case.run()
            case.seconds.append(time.perf_counter() - start)


def report(lines: Sequence[Line]) -> list[Record]:
    """Print the table and return what was measured as records."""
    triad = next(line.cases["float32"] for line in lines if line.name == "triad")
    speed = triad.bytes_moved / triad.median
    rows, records = [], []
    for line in lines:
        row = [line.name]
        for dtype in DTYPES:
            if dtype not in line.cases:
                row += ["-", "-", "-"]
                continue
            found = record_of(line.cases[dtype], speed)
            records.append(found | {"dtype": dtype, "wrong": line.wrong.get(dtype)})
            rate, fraction = found["bytes_per_second"] / 1e9, found["fraction_of_triad"]
            row += [f"{1e3 * found['median_seconds']:.3f}", f"{rate:.2f}", f"{fraction:.2f}"]
        rows.append([*row, str(sum(line.wrong.values())) if line.wrong else "-"])
    columns = [part for dtype in DTYPES for part in (f"{dtype} ms", "GB/s", "of triad")]
    print(results.table(("kernel", *columns, "wrong"), rows))
    return records


def record_of(case: Case, speed: float) -> Record:
    found, rate = spread(case.seconds), case.bytes_moved / case.median
    return {
        "bench": "kernels",
        "name": case.name,
        "bytes": case.bytes_moved,
        "median_seconds": found.median,
        "min_seconds": min(case.seconds),
        "spread_seconds": found.q3 - found.q1,
        "repeats": len(case.seconds),
        "bytes_per_second": rate,
        "fraction_of_triad": rate / speed,
    }


def draw(records: Sequence[Record], first: Record, path: Path) -> None:
    """Draw bars of every kernel's bandwidth as a fraction of the triad's."""
    from benchmarks.figures import COLOURS, GREY, bars, new_figure, save_as  # matplotlib is needed for plots only

    black, blue, *_ = COLOURS
    machine = first["machine"]
    title = "Bandwidth of the kernels against the memory's own"
    notes = (
        f"Measured on {machine['processor']} ({machine['cores']} cores), {first['instruction_set']}, "
        f"{first['threads']} thread(s), {first['count']:,} float32; medians of {records[0]['repeats']}.\n"
        "Each array counts once for each time that it is read or written. A triad a = b + s * c reads two arrays and "
        "writes one, so kernels that mostly read, or use arrays again from the cache, can exceed it. "
        "Blue: horovod-compress; grey: NumPy and torch."
    )
    figure, (panel,) = new_figure(title, notes, 8.5, 0.7 + 0.25 * len(records))
    colours = [GREY if by_others(r["name"]) else black if r["name"] == "triad" else blue for r in records]
    values = [r["fraction_of_triad"] for r in records]
    bars(panel, [r["name"] for r in records], values, colours, lambda value: f"{value:.2f}")
    panel.axvline(1.0, color=black, linewidth=0.9)
    panel.set_xlabel("bytes per second, as a fraction of the triad's")
    save_as(figure, path)


def run(options: argparse.Namespace, argv: Sequence[str] | None) -> int:
    """Run the cases and print the table; return 1 where a result is wrong, 2 where there is none."""
    torch.set_num_threads(options.threads)
    print(f"{processor()}, {ops.instruction_set()}, {options.count:,} elements, {options.threads} thread(s)")
    if options.filter not in "triad" and [case.name for case in cases(Arrays(_FEW), options.filter)] == ["triad"]:
        print(f"kernels: no case has {options.filter!r} in its name; without --filter all are shown", file=sys.stderr)
        return 2
    try:
        lines = lines_of(options.count, options.filter)
    except (MemoryError, RuntimeError) as error:  # torch's own error is the last
        print(f"kernels: --count {options.count} takes more memory than there is: {error}", file=sys.stderr)
        return 1
    for line in lines:
        line.check()
    measure([case for line in lines for case in line.cases.values()], options.repeat)
    facts = {"instruction_set": ops.instruction_set(), "count": options.count, "threads": options.threads}
    first, records = results.header("kernels", argv, **facts), report(lines)
    if options.json:
        results.append_json(options.json, [first, *records])
    if options.plot:
        draw([record for record in records if record["dtype"] == "float32"], first, options.plot)
    bad = [f"{line.name} ({dtype})" for line in lines for dtype, count in line.wrong.items() if count]
    if bad:
        print(f"wrong results: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0
