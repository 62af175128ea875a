"""Times training steps of well-known models: how much of the exchange hides behind the compute.

    python -m benchmarks.step --where lab --rate 1gbit --ranks 4 --model resnet50 --json all.json --plot plots

The gradients have the names, shapes and backward order of the real model, and travel in a real
Horovod job. The compute is simulated by sleeping: --compute-ms a step, a third of it forward,
spread over the layers as their multiply-adds are. Contestants are those of benchmarks.allreduce,
such as "horovod fp32", "none schedule=single", "marsit schedule=layerwise", "ddp:marsit" under DDP,
or "plain:marsit" without a wrapper; "headroom", which exchanges nothing, always takes part. Marsit
runs without full-precision rounds unless told otherwise; their cost is added in rows of its own. Any
wrong element fails the run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import bandwidth, overlap, shapes
from benchmarks.allreduce import (
    START_SECONDS,
    Progress,
    check_names,
    check_network,
    full_name,
    place_text,
    words,
)
from benchmarks.bandwidth import NOTHING, label
from benchmarks.lab import LabError
from benchmarks.launch import JobFailed, Launcher, open_launcher
from benchmarks.outcomes import records_in
from benchmarks.results import Record, append_json, check_targets, header, milliseconds, processor, read_json, table

PROGRAM = "python -m benchmarks.step"
METHODS = (
    "horovod fp32,horovod fp16,ddp fp32,ddp powersgd r1,none,marsit schedule=size:25MB,marsit schedule=single,"
    "marsit schedule=layerwise,global_qsgd,global_qsgd dithering=exponential"
)
ADAPTIVE = ("auto", "layerfusion", "mergecomp")  # they look for buckets in so many steps first
SEARCH_STEPS = 60
COLUMNS = (
    "method",
    "step ms [q1-q3]",
    "T1/TN",
    "exposed ms",
    "alone ms",
    "hidden",
    "phase ms",
    "wire ms",
    "MB sent",
    "buckets",
    "wrong",
)
NOTES = """\
step:    forward, backward and exchange, from a barrier to the slowest rank's own result; median [quartiles]
T1/TN:   scaling factor: T1 is the step of headroom, which exchanges nothing, measured in the same turns
exposed: step - T1, what the exchange adds to the step
alone:   the same difference without any compute to hide behind
hidden:  1 - exposed/alone; below 0 where exchange and compute disturb each other
phase:   sending, waiting and merging of all buckets in a step with compute; "-" where the method does not report it
wire:    bytes sent by a rank / rate of a link
MB sent: by one rank in one step; counted, or computed (*) as a ring sends them
plain:   buckets that the schedule leaves uncompressed, as that takes less time
wrong:   elements off the float64 mean by more than rounding; for compressed methods, not finite or not the same
         bits on every rank
K=...:   computed, not measured: (1 step of none + (K-1) steps of marsit) / K, as every K-th round of Marsit is in
         full precision; its other rows are of sign rounds only
The compute is simulated by sleeping, which leaves the cores to the exchange, as an accelerator does.
ddp powersgd reduces all gradients as one bucket, as several of them hang over Gloo: nothing of it hides behind
the backward pass."""


def arguments(argv: Sequence[str] | None, program: str = PROGRAM) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--where", choices=("lab", "here"), default="here", help="network lab, or horovodrun (default)")
    parser.add_argument("--hosts", help="hosts for --where here, in the form of horovodrun -H")
    parser.add_argument("--rate", help="rate of the lab's links, such as 1gbit (default: no limit)")
    parser.add_argument("--delay", help="delay of the lab's links, such as 5ms")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument(
        "--model", default="resnet50", help=f"{', '.join(shapes.models())}, or a CSV file of the same form"
    )
    parser.add_argument(
        "--compute-ms", type=float, default=300.0, help="compute time of a step, forward and backward (default 300)"
    )
    parser.add_argument(
        "--methods", nargs="+", default=[METHODS], help=f"contestants, also separated by commas (default {METHODS})"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="FILE", help="a file with more contestants")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the gradients are; ranks share a host's GPUs"
    )
    parser.add_argument(
        "--optimizer",
        choices=("none", "sgd"),
        default="none",
        help="whose steps count too: none (default), or SGD with momentum and weight decay",
    )
    parser.add_argument("--repeat", type=int, default=7, help="measurements of each contestant (default 7)")
    parser.add_argument("--memory", type=float, default=4.5, metavar="GB", help="memory of a rank (default 4.5)")
    parser.add_argument("--limit", type=float, help="seconds for the job (default: three times the expected time)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots as SVG and PNG files to DIR")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="show FILE's records, measure nothing")
    chosen = parser.parse_args(argv)
    chosen.methods = [full_name(word) for text in chosen.methods for word in words(text)]
    try:
        _check(chosen)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def _check(chosen: argparse.Namespace) -> None:
    shapes.load(chosen.model)
    if chosen.ranks < 2 or chosen.repeat < 1:
        raise ValueError(f"--ranks must be at least 2, --repeat at least 1, got {chosen.ranks} and {chosen.repeat}")
    for option in ("compute_ms", "memory", "limit"):
        value = getattr(chosen, option)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{option.replace('_', '-')} must be a number above 0, got {value:g}")
    for path in chosen.peer:
        if not Path(path).is_file():
            raise ValueError(f"--peer {path}: there is no such file")
    check_targets(chosen.json, chosen.plot)
    if chosen.source:
        chosen.records = read_json(chosen.source)
    else:
        check_network(chosen.where, [chosen.rate], chosen.delay, chosen.hosts)
        check_names(chosen.methods)


# ---- measuring --------------------------------------------------------------------------------


def measure(launcher: Launcher, chosen: argparse.Namespace, records: list[Record]) -> str:
    """Run the job, adding its records with what follows from them; return why it failed, empty if it did not."""
    place, progress = launcher.describe(), Progress()
    found: list[Record] = []
    where = f"{chosen.model}, {place_text(place)}"

    def take(line: str) -> None:
        progress.show(where, line)
        found.extend(records_in([line]))

    try:
        launcher.run("step", job_arguments(chosen), chosen.limit or limit_of(chosen, place), take)
    except (JobFailed, LabError) as failure:
        return f"{where}: {failure}"
    finally:  # what was measured is kept, however it ends
        progress.end()
        records += overlap.enriched(found, place)
    return ""


def job_arguments(chosen: argparse.Namespace) -> list[str]:
    model = str(Path(chosen.model).resolve()) if chosen.model.endswith(".csv") else chosen.model
    found = ["-m", "benchmarks.jobs.step", "--model", model, "--compute-ms", str(chosen.compute_ms)]
    found += ["--repeat", str(chosen.repeat), "--memory", str(chosen.memory), "--device", chosen.device]
    found += ["--optimizer", chosen.optimizer]
    for method in chosen.methods:
        found += ["--method", method]
    for path in chosen.peer:
        found += ["--peer", str(Path(path).resolve())]
    return found


def limit_of(chosen: argparse.Namespace, place: Record) -> float:
    """Return seconds that the job will not need unless something is stuck."""
    size = shapes.load(chosen.model).nbytes
    contestants = [*chosen.methods, *chosen.peer]
    cores = (os.cpu_count() or 1) / chosen.ranks if place["launcher"] == "lab" or place["hosts"] == 1 else 1.0
    # Every turn has two steps, one with compute and one without.
    repeat, rate_bits = 2 * chosen.repeat, place.get("rate_bits")
    turns = bandwidth.predicted_seconds(contestants, size, chosen.ranks, rate_bits, repeat, cores)
    compute = (len(contestants) + 20) * chosen.repeat * chosen.compute_ms / 1000
    searching = [name for name in contestants if any(f"schedule={word}" in name for word in ADAPTIVE)]
    turns += bandwidth.predicted_seconds(searching, size, chosen.ranks, rate_bits, SEARCH_STEPS, cores)
    compute += len(searching) * SEARCH_STEPS * chosen.compute_ms / 1000
    return START_SECONDS + 3 * (turns + compute)


# ---- showing ----------------------------------------------------------------------------------


def row(record: Record) -> list[str]:
    """Return the cells of a measured or computed record."""
    name, sent = record["name"], record["bytes_sent"]
    hidden, measured = record.get("hidden_share"), "median_seconds" in record
    seconds = record["median_seconds"] if measured else record["computed_seconds"]
    spread = f" [{milliseconds(record['q1_seconds'])}-{milliseconds(record['q3_seconds'])}]" if measured else ""
    return [
        label(name),
        milliseconds(seconds) + spread,
        f"{record['scaling']:.2f}",
        "-" if name == NOTHING else milliseconds(max(0.0, record["exposed_seconds"])),
        milliseconds(record.get("exchange_alone_seconds")),
        "-" if hidden is None else f"{hidden:.0%}",
        milliseconds(record.get("median_exchange_seconds")),
        "-" if name == NOTHING else milliseconds(record.get("wire_seconds")),
        "-" if not sent else f"{sent / 1e6:.4g}{'*' if record.get('bytes_computed') else ''}",
        buckets_text(record),
        str(record["wrong"]) if measured and record["check"] != "none" else "-",
    ]


def buckets_text(record: Record) -> str:
    plain = record.get("plain_buckets")
    return f"{record.get('buckets') or '-'}{f' ({plain} plain)' if plain else ''}"


def text(records: Sequence[Record]) -> str:
    """Return heading, table and notes of one run, the measured rows first."""
    shown = overlap.first_groups(records)
    first = shown[0]
    return "\n".join(
        [
            (
                f"{first['model']}: {first['parameters']:,} parameters in {first['tensors']} tensors, "
                f"{place_text(first['place'])}{device_text(first)}{optimizer_text(first)}"
            ),
            t1_text(records),
            table(COLUMNS, [row(record) for record in [*shown, *overlap.amortised(shown)]]),
            "",
            NOTES,
        ]
    )


def device_text(record: Record) -> str:
    """Return where the gradients were, if that is not the CPU."""
    device = record.get("device", "cpu")
    return "" if device == "cpu" else f", gradients on {device}"


def optimizer_text(record: Record) -> str:
    """Return which optimizer's steps count, if any do."""
    return ", steps of SGD with momentum and weight decay included" if record.get("optimizer") == "sgd" else ""


def t1_text(records: Sequence[Record]) -> str:
    """Return what compute was asked for, and what the steps without exchange took."""
    wanted = records[0]["compute_seconds"]
    found = [record["median_seconds"] for record in records if record["name"] == NOTHING]
    said = ", ".join(milliseconds(seconds) for seconds in found)
    several = f" in {len(found)} groups that fit into memory" if len(found) > 1 else ""
    return f"compute {milliseconds(wanted)} ms (simulated by sleeping); T1 measured: {said} ms{several}"


def runs(records: Sequence[Record]) -> list[list[Record]]:
    """Return the measured records of a file, one list for each run."""
    found: list[list[Record]] = []
    for record in records:
        if record["name"] == "header":
            found.append([])
        elif "median_seconds" in record and record["bench"] == "step":
            found[-1].append(record)
    return [run for run in found if run]


def measured_records(chosen: argparse.Namespace, first: Record) -> tuple[list[Record], str]:
    """Measure and write what was measured; return all records, and what failed."""
    records: list[Record] = []
    try:
        with open_launcher(chosen.where, chosen.ranks, chosen.rate, chosen.delay, chosen.hosts) as launcher:
            failure = measure(launcher, chosen, records)
    except (LabError, ValueError) as error:
        failure = str(error)
    if chosen.json and records:
        append_json(chosen.json, [first, *records, *overlap.amortised(overlap.first_groups(records))])
    return [first, *records], failure


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    chosen = arguments(argv, program)
    failures: list[str] = []
    if chosen.source:
        records = chosen.records
    else:
        print(f"{processor()}, {os.cpu_count()} cores", flush=True)
        records, failure = measured_records(chosen, header("step", argv))
        failures += [failure] if failure else []
    for run in runs(records):
        print(f"\n{text(run)}")
    if chosen.plot:
        from benchmarks import figures_training

        for run in runs(records):
            for path in figures_training.draw_steps(run, records[0], chosen.plot):
                print(f"wrote {path}")
    if bad := [label(r["name"]) for run in runs(records) for r in run if r["wrong"]]:
        failures.append(f"wrong results: {', '.join(bad)}")
    for failure in failures:
        print(f"step: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
