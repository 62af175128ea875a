"""Times the mean of one tensor over all ranks: stock Horovod, this package, PyTorch's DDP, and peers of yours.

    python -m benchmarks.allreduce --where lab --rates 1gbit,100mbit --ranks 2,4 --json all.json --plot plots

Every cell of rate, ranks and size is measured in a real Horovod job, in which all contestants take
turns. A contestant is "horovod fp32", "horovod fp16", "headroom" (exchanges nothing), "ddp fp32",
"ddp fp16", "ddp powersgd r1", "ddp powersgd r4", or a method of this package with options:
"marsit fold step_size=tensor seed=3", under Horovod or, as "ddp:marsit" or
"plain:marsit", under DDP or with a plain module. Marsit runs without full-precision rounds unless
told otherwise. Sizes are bytes of float32 (1kB, 100MB) or elements (25Melem). Any wrong element fails the run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import bandwidth
from benchmarks.bandwidth import label, size_in_bytes, without_front
from benchmarks.lab import LabError
from benchmarks.lab.rates import Rate, parse_delay
from benchmarks.launch import JobFailed, Launcher, Outcome, open_launcher
from benchmarks.outcomes import records_in
from benchmarks.results import (
    Record,
    append_json,
    check_targets,
    header,
    milliseconds,
    processor,
    read_json,
    size_text,
    table,
)

PROGRAM = "python -m benchmarks.allreduce"
SIZES = "1kB,10kB,100kB,1MB,10MB,100MB"
RATES = {"lab": "10gbit,1gbit,100mbit,none", "here": "none"}
METHODS = (
    "horovod fp32,horovod fp16,headroom,none ring,none fold,none auto,fp16 ring,marsit ring,marsit fold,marsit auto,"
    "global_qsgd,global_qsgd dithering=exponential,ddp fp32,ddp fp16,ddp powersgd r1,ddp powersgd r4"
)
START_SECONDS = 60.0  # for horovodrun, imports and connections
CHECKED_TURNS = 20
COLUMNS = (
    "method",
    "median ms [q1-q3]",
    "x faster",
    "exchange ms",
    "of wire limit",
    "alg GB/s",
    "bus GB/s",
    "MB sent",
    "wrong",
)
NOTES = """\
median ms:     from a barrier to the result on the slowest rank, codec and copies included; [quartiles]
x faster:      than horovod fp32 in the same job; the value of headroom is the most that anything could reach
exchange ms:   the exchange by itself: sending, waiting and merging a payload that is there; "-" where a method has none
of wire limit: (bytes sent by a rank / rate of a link) / exchange; where a method has no exchange by itself, / median,
               codec and copies included: these are marked ~, and lower than the others for that
alg, bus:      S/t and S/t * 2(M-1)/M with S the float32 bytes; e: effective, as the method sends less than S
MB sent:       by one rank in one turn; counted, or computed (*) as a ring sends them
wrong:         elements off the float64 mean by more than rounding; for compressed methods, not finite or not the
               same bits on every rank
headroom exchanges nothing; horovod is called as hvd.allreduce_ in place, all others reduce the gradient of a model
with one parameter that takes no time to compute. Marsit runs without full-precision rounds
(full_precision_every=0), which its default has now and then."""

BURST_NOTE = "few bursts: within a few bursts of the emulated link: looks faster than a real one"


# ---- options ----------------------------------------------------------------------------------


def arguments(argv: Sequence[str] | None, program: str = PROGRAM) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--where", choices=("lab", "here"), default="here", help="network lab, or horovodrun (default)")
    parser.add_argument("--hosts", help="hosts for --where here, in the form of horovodrun -H")
    parser.add_argument("--rates", help=f"rates of the lab's links (default {RATES['lab']})")
    parser.add_argument("--delay", help="delay of the lab's links, such as 5ms")
    parser.add_argument("--ranks", default="2", help="numbers of ranks, separated by commas (default 2)")
    parser.add_argument("--sizes", default=SIZES, help=f"(default {SIZES})")
    parser.add_argument("--methods", default=METHODS, help="contestants, separated by commas (default: all built in)")
    parser.add_argument("--peer", action="append", default=[], metavar="FILE", help="a file with more contestants")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of each contestant (default 5)")
    parser.add_argument(
        "--budget", type=float, default=900, metavar="SECONDS", help="skip cells that will take longer (default 900)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write plots as SVG and PNG files to DIR")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source", help="show FILE's records again")
    parser.add_argument(
        "--check-bytes", action="store_true", help="compare the one method's bytes_sent with the lab's link counters"
    )
    chosen = parser.parse_args(argv)
    try:
        _read_lists(chosen)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def _read_lists(chosen: argparse.Namespace) -> None:
    chosen.rates = words(RATES[chosen.where] if chosen.rates is None else chosen.rates)
    chosen.ranks = [_ranks(word) for word in words(chosen.ranks)]
    chosen.sizes = sorted({size_in_bytes(word) for word in words(chosen.sizes)})
    chosen.methods = [full_name(word) for word in words(chosen.methods)]
    for option in ("rates", "ranks", "sizes"):
        if not getattr(chosen, option):
            raise ValueError(f"--{option} must not be empty")
    if not chosen.methods and not chosen.peer:
        raise ValueError("--methods must not be empty without a --peer FILE")
    if chosen.repeat < 1 or not chosen.budget > 0:
        raise ValueError(f"--repeat must be at least 1, --budget above 0, got {chosen.repeat} and {chosen.budget:g}")
    for path in chosen.peer:
        if not Path(path).is_file():
            raise ValueError(f"--peer {path}: there is no such file")
    if chosen.check_bytes and (chosen.where != "lab" or len(chosen.methods) != 1):
        raise ValueError("--check-bytes needs --where lab, whose links are counted, and exactly one of --methods")
    check_targets(chosen.json, chosen.plot)
    if chosen.source:
        chosen.records = read_json(chosen.source)
    else:
        check_network(chosen.where, chosen.rates, chosen.delay, chosen.hosts)
        check_names(chosen.methods)


def _ranks(word: str) -> int:
    if not word.isdecimal() or int(word) < 2:
        raise ValueError(f"--ranks takes whole numbers, at least 2, got {word!r}")
    return int(word)


def check_names(methods: Sequence[str], stock: Sequence[str] | None = None) -> None:
    """Refuse contestants that no job could take, before one is started.

    Raises:
        ValueError: says which, and what there is.
    """
    from benchmarks.peers import names  # it imports torch, which --help need not wait for

    try:
        names.check(methods, *([] if stock is None else [stock]))
    except names.PeerError as error:
        raise ValueError(str(error)) from None


def check_network(where: str, rates: Sequence[str | None], delay: str | None, hosts: str | None) -> None:
    """Refuse links that cannot be had, before the first job.

    Raises:
        ValueError: says why not.
    """
    limited = [rate for rate in rates if rate not in (None, "none")]
    if where == "here" and (limited or delay):
        raise ValueError("only the lab can limit or delay links: run --where lab, or leave the rate and delay out")
    if where == "lab" and hosts:
        raise ValueError("the lab makes its own hosts; leave --hosts out, or run --where here")
    for rate in limited:
        Rate.parse(str(rate))
    if delay:
        parse_delay(delay)


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def full_name(method: str) -> str:
    """Return a contestant's name as the job takes it: Marsit has no full-precision rounds unless they are asked for."""
    plain = without_front(method.split()[0]) == "marsit" and "full_precision_every=" not in method
    return f"{method} full_precision_every=0" if plain else method


# ---- measuring --------------------------------------------------------------------------------


class Progress:
    """One line that says what is under way, rewritten on a terminal; elsewhere a line for every cell."""

    def __init__(self) -> None:
        self._rewrites, self._cell = sys.stderr.isatty(), ""

    def show(self, where: str, line: str) -> None:
        if ": round " not in line:
            return
        text, cell = f"{where}, {line}", f"{where}, {line.split(':')[0]}"
        if self._rewrites:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
        elif cell != self._cell:
            print(f"measuring {cell}", file=sys.stderr, flush=True)
        self._cell = cell

    def end(self) -> None:
        if self._rewrites and self._cell:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        self._cell = ""


def job_arguments(sizes: Sequence[int], chosen: argparse.Namespace, repeat: int) -> list[str]:
    found = ["-m", "benchmarks.jobs.allreduce", "--elements", ",".join(str(size // 4) for size in sizes)]
    found += ["--repeat", str(repeat)]
    for method in chosen.methods:
        found += ["--method", method]
    for path in chosen.peer:
        found += ["--peer", str(Path(path).resolve())]
    return found


def seconds_of(size: int, place: Record, chosen: argparse.Namespace, repeat: int) -> float:
    """Return the predicted time of a cell."""
    contestants = [*chosen.methods, *chosen.peer]
    cores = (os.cpu_count() or 1) / place["ranks"] if place["launcher"] == "lab" or place["hosts"] == 1 else 1.0
    return bandwidth.predicted_seconds(contestants, size, place["ranks"], place.get("rate_bits"), repeat, cores)


def why_skipped(size: int, place: Record, chosen: argparse.Namespace) -> str:
    """Return why a cell is not to be measured, empty if it is."""
    seconds = seconds_of(size, place, chosen, chosen.repeat)
    if seconds > chosen.budget:
        return f"would take about {seconds:,.0f} s, the budget is {chosen.budget:,.0f} s (--budget)"
    need = bandwidth.predicted_memory([*chosen.methods, *chosen.peer], size, place["ranks"])
    free = free_memory()
    if (place["launcher"] == "lab" or place["hosts"] == 1) and free and need > free:
        return f"would need about {size_text(need)} of memory, {size_text(free)} are free"
    return ""


def free_memory() -> int | None:
    try:
        import psutil
    except ImportError:  # then nothing is skipped for lack of memory
        return None
    return int(psutil.virtual_memory().available)


def measure(launcher: Launcher, chosen: argparse.Namespace, records: list[Record]) -> str:
    """Measure all sizes in one job, adding to the records; return why that failed, empty if it did not."""
    place = launcher.describe()
    reasons = {size: why_skipped(size, place, chosen) for size in chosen.sizes}
    records += [skipped(size, reason, place) for size, reason in reasons.items() if reason]
    sizes = [size for size, reason in reasons.items() if not reason]
    if not sizes:
        return ""
    progress, where = Progress(), place_text(place)
    limit = START_SECONDS + 3 * sum(seconds_of(size, place, chosen, chosen.repeat) for size in sizes)

    def take(line: str) -> None:
        progress.show(where, line)
        records.extend(bandwidth.enriched(record, place) for record in records_in([line]))

    try:
        outcome = launcher.run("allreduce", job_arguments(sizes, chosen, chosen.repeat), limit, take)
    except JobFailed as failure:
        return f"{where}: {failure}"
    finally:
        progress.end()
    records += link_records(outcome, place)
    return ""


def skipped(size: int, reason: str, place: Record) -> Record:
    return {"bench": "allreduce", "name": "skipped", "bytes": size, "reason": reason, "place": place}


def link_records(outcome: Outcome, place: Record) -> list[Record]:
    if outcome.links is None:
        return []
    links = [link._asdict() for link in outcome.links]
    return [{"bench": "allreduce", "name": "links", "place": place, "links": links}]


# ---- showing ----------------------------------------------------------------------------------


def place_text(place: Record) -> str:
    """Return where a job ran, with what of it was emulated."""
    ranks = f"{place['ranks']} ranks"
    if place["launcher"] != "lab":
        return f"{ranks} on {'this machine' if place['hosts'] == 1 else str(place['hosts']) + ' hosts'}"
    rate = f"links limited to {place['rate']} by tc tbf" if place.get("rate") else "links without limit"
    delay = f", delay {milliseconds(place['delay_seconds'])} ms" if place.get("delay_seconds") else ""
    return f"{ranks} on {place['hosts']} emulated hosts, {rate}{delay}"


def wire_text(record: Record) -> str:
    """Return the share of the wire's limit; ~ where it is of the whole time, "few bursts" where it would mislead."""
    if record.get("within_bursts"):
        return "few bursts"
    if record["fraction_of_wire"] is None:
        return "-"
    return f"{'~' if record['median_exchange_seconds'] is None else ''}{record['fraction_of_wire']:.2f}"


def row(record: Record, cell: Sequence[Record]) -> list[str]:
    def gigabytes(value: float | None) -> str:
        return "-" if value is None else f"{value / 1e9:.3g}{'e' if record['effective'] else ''}"

    faster, sent = bandwidth.speed_up(record, cell), record["bytes_sent"]
    quartiles = f"[{milliseconds(record['q1_seconds'])}-{milliseconds(record['q3_seconds'])}]"
    return [
        label(record["name"]),
        f"{milliseconds(record['median_seconds'])} {quartiles}",
        "-" if faster is None else f"{faster:.2f}",
        milliseconds(record["median_exchange_seconds"]),
        wire_text(record),
        gigabytes(record["algorithm_bandwidth"]),
        gigabytes(record["bus_bandwidth"]),
        "-" if sent is None else f"{sent / 1e6:.4g}{'*' if record['bytes_computed'] else ''}",
        "-" if record["check"] == "none" else str(record["wrong"]),
    ]


def cell_text(size: int, cell: Sequence[Record]) -> str:
    """Return the heading, the table and the verdict of one size; why it was skipped, if it was."""
    heading = f"{size_text(size)} ({size // 4:,} float32), {place_text(cell[0]['place'])}"
    if cell[0]["name"] == "skipped":
        return f"{heading}\nskipped: {cell[0]['reason']}"
    note = BURST_NOTE if any(record.get("within_bursts") for record in cell) else ""
    lines = [heading, table(COLUMNS, [row(record, cell) for record in cell]), note, bandwidth.verdict(cell)]
    return "\n".join(filter(None, lines))


def cells(records: Sequence[Record]) -> list[list[Record]]:
    """Return the records of each place and size: places in the order in which they came, sizes growing."""
    places: dict[str, dict[int, list[Record]]] = {}
    for record in records:
        if "bytes" in record:
            sizes = places.setdefault(place_text(record["place"]), {})
            sizes.setdefault(record["bytes"], []).append(record)
    return [sizes[size] for sizes in places.values() for size in sorted(sizes)]


def show(records: Sequence[Record]) -> None:
    for cell in cells(records):
        print(f"\n{cell_text(cell[0]['bytes'], cell)}", flush=True)


def wrong_names(records: Sequence[Record]) -> list[str]:
    return [f"{label(r['name'])} ({size_text(r['bytes'])})" for r in records if r.get("wrong")]


# ---- counted bytes ----------------------------------------------------------------------------


def check_bytes(launcher: Launcher, chosen: argparse.Namespace) -> list[Record]:
    """Run one method alone with the largest size; compare what it says it sent with what the links carried.

    Raises:
        JobFailed: the job failed.
    """
    size, turns, place = chosen.sizes[-1], max(CHECKED_TURNS, chosen.repeat), launcher.describe()
    limit = START_SECONDS + 3 * seconds_of(size, place, chosen, turns)
    outcome = launcher.run("check-bytes", job_arguments([size], chosen, turns), limit)
    record, links = outcome.records[0], outcome.links or []
    carried, said = sum(link.sent for link in links), record["bytes_sent_all"]
    return [
        {
            "bench": "allreduce",
            "name": "check-bytes",
            "method": record["name"],
            "tensor_bytes": size,
            "turns": turns,
            "place": place,
            "bytes_sent_all": said,
            "bytes_on_links": carried,
            "relative_difference": carried / said - 1 if said else None,
            "wrong": record["wrong"],
        },
        *link_records(outcome, place),
    ]


def bytes_text(record: Record) -> str:
    difference = record["relative_difference"]
    shown = "" if difference is None else f", {difference:+.2%}"
    return (
        f"{label(record['method'])}, {size_text(record['tensor_bytes'])}, {record['turns']} turns and warm-up, "
        f"{place_text(record['place'])}:\n  the method counts {record['bytes_sent_all']:,} bytes on all ranks, "
        f"the links carried {record['bytes_on_links']:,}{shown}\n  (headers of Ethernet, IP and TCP, acknowledgements, "
        f"and Horovod's own messages; the kernel counts few headers where it hands over several segments as one)"
    )


# ---- main -------------------------------------------------------------------------------------


def run(chosen: argparse.Namespace, first: Record) -> tuple[list[Record], list[str]]:
    """Measure the whole matrix; return all records, and what failed."""
    every, failures = [first], []
    for ranks, rate in itertools.product(chosen.ranks, chosen.rates):
        records: list[Record] = []
        try:  # what was measured is kept, however it ends
            with open_launcher(chosen.where, ranks, rate, chosen.delay, chosen.hosts) as launcher:
                if chosen.check_bytes:
                    records += check_bytes(launcher, chosen)
                    print(bytes_text(records[0]), flush=True)
                elif failure := measure(launcher, chosen, records):
                    failures.append(failure)
        except LabError as failure:
            failures.append(f"{ranks} ranks, {rate}: {failure}")
            break  # the next lab would fail for the same reason
        except (JobFailed, ValueError) as failure:
            failures.append(f"{ranks} ranks, {rate}: {failure}")
        finally:
            show(records)
            if chosen.json and records:
                append_json(chosen.json, [first, *records] if len(every) == 1 else records)
            every += records
    return every, failures


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    chosen = arguments(argv, program)
    failures: list[str] = []
    if chosen.source:
        records = chosen.records
        show(records)
    else:
        began = time.monotonic()
        print(f"{processor()}, {os.cpu_count()} cores", flush=True)
        records, failures = run(chosen, header("allreduce", argv))
        print(f"\n{time.monotonic() - began:.0f} s in all", file=sys.stderr)
    if cells(records):
        print(f"\n{NOTES}")
    if chosen.plot:
        from benchmarks import figures_allreduce

        for path in figures_allreduce.draw(records, chosen.plot):
            print(f"wrote {path}")
    if bad := wrong_names(records):
        failures.append(f"wrong results: {', '.join(bad)}")
    for failure in failures:
        print(f"allreduce: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
