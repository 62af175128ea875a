"""Checks every CUDA kernel against the CPU, then times it beside the GPU's own copy, torch and CuPy.

`wrong` counts elements that differ from the CPU's in any bit; any makes the run fail. Times are those of CUDA
events around one call, of short ones around several, on arrays that take turns and together are larger than the
cache. GB/s counts every array
once for each time it is read and once for each time it is written; `of copy` is that as a fraction of what a copy
of the same run reaches. Calls that give a number to the host wait for it, and their time holds the wait.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_cases, gpu_steps, results, single
from benchmarks.gpu_cases import Arguments, Case, Inputs
from benchmarks.kernel_cases.case import differences
from benchmarks.results import Record, spread, table
from horovod_compress import ops
from horovod_compress.exchange import device
from horovod_compress.exchange.device import Device

NO_GPU = """\
No CUDA device is visible here, so nothing was measured.
  Run this on a machine with an NVIDIA GPU, with a torch that has CUDA (torch.version.cuda is {version}) and with
  the kernels built there: make setup CUDA=1
  Without a GPU, pytest tests/kernels/test_cuda.py emulates the same kernels and compares them with the CPU."""
NO_KERNELS = """\
{error}
  Build them on this machine: make setup CUDA=1"""
CACHES = 4  # how many times the cache the arrays of a case take together
WARM_UP = 3
LONG = 1e-3  # seconds between two events that hide what Python needs to queue a call
MOST_CALLS = 100  # between two events
BUSY_CYCLES = 20_000_000  # of a GPU's clock: some 10 ms, the least that it is kept busy
CYCLES = 2e9  # of a GPU's clock in a second, about


@dataclass
class Timed:
    """One line of the table."""

    name: str
    bytes_moved: int
    wrong: int | None
    seconds: list[float] = field(default_factory=list)
    #: Kernels and memsets of one call, where they are counted.
    started: tuple[int, int] | None = None


# ---- without a GPU ----------------------------------------------------------------------------


def unavailable() -> str | None:
    """Return why nothing can be measured here, or None."""
    if not torch.cuda.is_available():
        return NO_GPU.format(version=torch.version.cuda)
    try:
        a, b, c = (torch.zeros(1, device="cuda") for _ in range(3))
        ops.triad(a, b, c, 1.0)
    except ImportError as error:
        return NO_KERNELS.format(error=error)
    return None


# ---- wrong elements ---------------------------------------------------------------------------


def placed(value: Any, device: str) -> Any:
    """Return a copy of an argument on a device."""
    if isinstance(value, (list, tuple)):
        return type(value)(placed(part, device) for part in value)
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def whole(value: Any) -> Any:
    """Return a result as numbers; counts are tensors on CUDA."""
    if isinstance(value, tuple):
        return tuple(int(part) for part in value)
    if isinstance(value, list) or (isinstance(value, Tensor) and value.numel() != 1):
        return [int(part) for part in value]
    return None if value is None else int(value)


def wrong_elements(case: Case, count: int, device: str = "cuda") -> int:
    """Return how many elements a kernel writes on CUDA that it does not write on the CPU."""
    given = case.make(Inputs(count))
    finals, found = [], []
    for place in ("cpu", device):
        positional, named = placed(given.positional, place), placed(dict_items(given), place)
        found.append(whole(single.named(case.kernel)(*positional, **dict(named))))
        finals.append([tensor.cpu() for tensor in tensors([positional, [pair[1] for pair in named]])])
    return int(found[0] != found[1]) + sum(differences(a, b) for a, b in zip(*finals, strict=True))


def dict_items(given: Arguments) -> list[tuple[str, Any]]:
    return list(given.named.items())


# ---- time -------------------------------------------------------------------------------------


def turns(given: Arguments, cache: int) -> int:
    """Return how many copies of the arguments are needed for arrays larger than the cache."""
    size = sum(tensor.nbytes for tensor in tensors([given.positional, list(given.named.values())]))
    return max(2, -(-CACHES * cache // max(size, 1))) if size < CACHES * cache else 2


def calls_for(seconds: float) -> int:
    """Return how many calls of so many seconds are timed together."""
    return max(1, min(MOST_CALLS, math.ceil(LONG / max(seconds, 1e-9))))


def busy_cycles(calls: int, host: float) -> int:
    """Return for how long a GPU must be busy while so many calls are queued, each in ``host`` seconds."""
    return max(BUSY_CYCLES, math.ceil(2 * calls * host * CYCLES))


def measure(runs: Sequence[Callable[[], object]], repeat: int, calls: int, cycles: int = BUSY_CYCLES) -> list[float]:
    """Return the seconds of one call, ``repeat`` times the mean of so many."""
    turn, pairs = cycle(runs), []
    for _ in range(repeat):
        # The GPU is kept busy while the calls are queued: an idle one would wait for Python between two events.
        torch.cuda._sleep(cycles)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(calls):
            next(turn)()
        after.record()
        pairs.append((before, after))
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 / calls for before, after in pairs]


def timed(runs: Sequence[Callable[[], object]], repeat: int) -> list[float]:
    """Return the seconds of a call, measured ``repeat`` times, the runs taking turns."""
    host = 0.0
    for index in range(WARM_UP):
        started = time.perf_counter()
        runs[index % len(runs)]()
        host = time.perf_counter() - started
    torch.cuda.synchronize()
    calls = calls_for(min(measure(runs, WARM_UP, 1)))
    return measure(runs, repeat, calls, busy_cycles(calls, host))


def kernel_runs(case: Case, count: int, cache: int) -> tuple[list[Callable[[], object]], int]:
    """Return calls of a kernel that take turns, and the bytes that each of them moves."""
    given = case.make(Inputs(count))
    runs: list[Callable[[], object]] = []
    for _ in range(min(turns(given, cache), 64)):
        positional, named = placed(given.positional, "cuda"), dict(placed(dict_items(given), "cuda"))
        runs.append(partial(single.named(case.kernel), *positional, **named))
    return runs, given.bytes_moved


def measured(options: argparse.Namespace) -> list[Timed]:
    """Check and time all cases; the copy is the first."""
    cache = int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20))
    lines = []
    for name, bytes_moved, runs in gpu_cases.peers(options.count):
        if name == gpu_cases.COPY or options.filter in name:
            lines.append(Timed(name, bytes_moved, None, timed(runs, options.repeat)))
    for case in gpu_cases.CASES:
        if options.filter not in case.name:
            continue
        wrong = wrong_elements(case, min(options.count, options.check_count))
        runs, bytes_moved = kernel_runs(case, options.count, cache)
        lines.append(Timed(case.name, bytes_moved, wrong, timed(runs, options.repeat)))
        del runs
        torch.cuda.empty_cache()
    return lines + [whole_step(steps, options.repeat) for steps in gpu_steps.STEPS if options.filter in steps.name]


# ---- a whole step -----------------------------------------------------------------------------


def wrong_in_steps(steps: gpu_steps.LocalSteps, there: Device) -> int:
    """Return how many elements two steps write on a device that they do not write on the CPU."""
    runs = [steps.on(where) for where in (Device(), there)]
    for run in runs * 2:
        gpu_steps.whole_step(run)
    pairs = zip(*([tensor.cpu() for step in run for tensor in step.written()] for run in runs), strict=True)
    return sum(differences(a, b) for a, b in pairs)


def started_by(run: Callable[[], object]) -> tuple[int, int]:
    """Return how many kernels and memsets a call starts, torch's own among them.

    Raises:
        RuntimeError: the profiler has seen no kernel.
    """
    profiled(run)  # the first profile of a process may begin after what it should see
    kinds = profiled(run)
    if not kinds["kernel"]:
        raise RuntimeError(
            f"torch's profiler saw no kernel in a step, but {dict(kinds)}: launches cannot be counted; another program "
            "may hold the GPU's counters (CUPTI), or this torch may have been built without it"
        )
    return kinds["kernel"], kinds["gpu_memset"]


def profiled(run: Callable[[], object]) -> Counter[str]:
    """Return how much of each kind a trace of a call holds; in any version of torch, kinds have these names."""
    cuda = [torch.profiler.ProfilerActivity.CUDA]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Profiler clears events")  # of earlier cycles; there are none
        with torch.profiler.profile(activities=cuda) as profile:
            run()
            torch.cuda.synchronize()
        profile.export_chrome_trace(str(file := Path(folder) / "trace.json"))
        events = json.loads(file.read_text())["traceEvents"]
    return Counter(event["cat"] for event in events if "cat" in event)


def whole_step(steps: gpu_steps.LocalSteps, repeat: int) -> Timed:
    """Check and time what a rank does in a step, and count what it starts."""
    where = device.of("cuda")
    wrong = wrong_in_steps(steps, where)
    runs = [partial(gpu_steps.whole_step, steps.on(where)) for _ in range(2)]
    return Timed(steps.name, steps.bytes_moved, wrong, timed(runs, repeat), started_by(runs[0]))


# ---- reporting --------------------------------------------------------------------------------


def report(lines: Sequence[Timed], kind: str) -> list[Record]:
    """Print the table and return its lines as records."""
    copy = next(line for line in lines if line.name == gpu_cases.COPY)
    limit = copy.bytes_moved / spread(copy.seconds).median
    rows, records = [], []
    for line in lines:
        found = spread(line.seconds)
        rate = line.bytes_moved / found.median
        shown = "-" if line.wrong is None else str(line.wrong)
        rows.append([line.name, f"{1e6 * found.median:.1f}", f"{rate / 1e9:.1f}", f"{rate / limit:.2f}", shown])
        records.append(
            {
                "bench": "gpu",
                "name": line.name,
                "device": kind,
                "bytes": line.bytes_moved,
                "median_seconds": found.median,
                "min_seconds": min(line.seconds),
                "spread_seconds": found.q3 - found.q1,
                "repeats": len(line.seconds),
                "bytes_per_second": rate,
                "fraction_of_copy": rate / limit,
                "wrong": line.wrong,
                "launches": line.started and line.started[0],
                "memsets": line.started and line.started[1],
            }
        )
    print(table(["kernel", "median us", "GB/s", "of copy", "wrong"], rows))
    for line in lines:
        if line.started:
            launches, memsets = line.started
            print(f"{line.name} in {len(gpu_steps.ENDS)} buckets: {launches} launches, {memsets} memsets")
    return records


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=25_000_000, help="float32 elements (default 25 million)")
    parser.add_argument("--check-count", type=int, default=1_000_003, help="elements compared (default 1,000,003)")
    parser.add_argument("--repeat", type=int, default=30, help="measurements of each case (default 30)")
    parser.add_argument("--filter", default="", help="only cases whose name contains this, and the copy")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append JSON lines to FILE")
    options = parser.parse_args(argv)
    if min(options.count, options.check_count, options.repeat) < 1:
        parser.error("--count, --check-count and --repeat must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 if all is right, 1 if an element is wrong, 2 if there is nothing to measure with."""
    options = arguments(argv)
    if reason := unavailable():
        print(reason, file=sys.stderr)
        return 2
    kind = torch.cuda.get_device_name(0)
    print(f"{kind}, CUDA {torch.version.cuda}, {options.count:,} float32")
    lines = measured(options)
    records = report(lines, kind)
    if options.json:
        facts = {"device": kind, "cuda": torch.version.cuda, "count": options.count}
        results.append_json(options.json, [results.header("gpu", argv, **facts), *records])
    bad = [line.name for line in lines if line.wrong]
    if bad:
        print(f"wrong results: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
