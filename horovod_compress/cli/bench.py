"""Run a benchmark: kernels, allreduce or training.

    hvd-compress bench kernels
    hvd-compress bench allreduce --where lab --rates 1gbit --ranks 4
    hvd-compress bench training step --model resnet50 --rate 1gbit --where lab

Arguments after the level belong to the benchmark; `hvd-compress bench allreduce --help` lists them. An
installed package times a few of its kernels; the other benchmarks are part of the source of horovod-compress.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .common import refuse, table

LEVELS = ("kernels", "allreduce", "training")

_KERNELS = """\
Times the kernels that an installed package has, each against its reference: a small part of the benchmarks.

GB/s counts every array once for each time it is read and once for each time it is written. `wrong` counts elements that
differ from the NumPy reference.
"""
_ELEMENTS, _REPEAT = 1_000_000, 9
_ROW = 1024
_MOST_ELEMENTS = 1 << 28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the level; what follows belongs to the benchmark."""
    shown = f"{{{','.join(LEVELS)}}}"
    told = "what to measure: kernels, one tensor, or training steps"
    parser.add_argument("level", choices=LEVELS, metavar=shown, help=told)
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="the benchmark's own arguments")
    rest.required = False  # else argparse asks for "..." where the level is missing


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark in this process and return its exit status."""
    asked = getattr(arguments, "json", False)
    if arguments.rest[-1:] == ["--json"]:  # the command's own, written last
        asked, arguments.rest = True, arguments.rest[:-1]
    if asked and any(word.partition("=")[0] == "--json" for word in arguments.rest):
        return refuse("bench", "--json prints the records, --json FILE writes them; choose one")
    root = Path(__file__).resolve().parents[2]
    if not (root / "benchmarks" / "__init__.py").is_file():  # it is an installed package
        if arguments.level == "kernels":
            return time_kernels(arguments.rest, as_json=asked)
        return refuse(
            f"bench {arguments.level}",
            "this benchmark is not part of an installed package, which has only `hvd-compress bench kernels`; get the "
            "source of horovod-compress, run `make setup` in it, and run this command from there",
        )
    sys.path.insert(0, str(root))
    benchmark = importlib.import_module(f"benchmarks.{arguments.level}")
    program = f"hvd-compress bench {arguments.level}"
    if not asked:
        return int(benchmark.main(arguments.rest, program) or 0)
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.json"
        with contextlib.redirect_stdout(sys.stderr):  # tables are for people
            status = int(benchmark.main([*arguments.rest, "--json", str(records)], program) or 0)
        if records.exists():
            print_records(records)
    return status


def print_records(path: Path) -> None:
    """Print a benchmark's records, the header's command without the file that they were written to."""
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record.get("name") == "header":
            record["command"] = record["command"][:-2]  # --json and the path come last
        print(json.dumps(record))


# ---- kernels of an installed package ----------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A call that leaves its results in ``out``.

    Args:
        bytes_moved: read and written by one call.
    """

    name: str
    bytes_moved: int
    out: Sequence[Any]
    run: Callable[[], object]


def time_kernels(arguments: Sequence[str], *, as_json: bool) -> int:
    """Print a table or JSON lines; return 1 if a kernel is wrong."""
    options = _parse(arguments)
    from .. import ops

    records = [_record(kernel, options.repeat) for kernel in kernels(options.count)]
    first = {"bench": "kernels", "name": "header", "instruction_set": ops.instruction_set(), "count": options.count}
    if as_json:
        print("\n".join(json.dumps(record) for record in [first, *records]))
    else:
        rows = [
            [one["name"], f"{1e3 * one['median_seconds']:.3f}", f"{1e3 * one['min_seconds']:.3f}",
             f"{one['bytes_per_second'] / 1e9:.2f}", str(one["wrong"])]
            for one in records
        ]  # fmt: skip
        said = table(("kernel", "median ms", "min ms", "GB/s", "wrong"), rows)
        print(f"{options.count:,} float32, {first['instruction_set']}\n{said}")
    if wrong := [record["name"] for record in records if record["wrong"]]:
        print(f"wrong results: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def kernels(count: int) -> Iterator[Kernel]:
    """Return one kernel of each family that the methods are made from."""
    import torch

    from .. import ops
    from ..ops.keys import Key

    key, words = Key(seed=1, step=2, bucket=3, rank=4), ops.word_count(count)
    generator = torch.Generator().manual_seed(1)
    grad, residual = (torch.randn(count, generator=generator, device="cpu") for _ in range(2))
    out, norm = torch.zeros(count, device="cpu"), grad.abs().max().view(1)
    bits = torch.zeros(words, dtype=torch.int64, device="cpu")
    sums = torch.zeros(-(-count // _ROW), dtype=torch.float64, device="cpu")
    codes, mine = (torch.zeros(count, dtype=torch.uint8, device="cpu") for _ in range(2))
    rule: dict[str, Any] = {"bits": 8, "headroom": 3}
    ops.exponential_encode_all([grad], [norm], [count], [codes], key, **rule)
    yield Kernel("triad", 12 * count, [out], lambda: ops.triad(out, grad, residual, 0.5))
    yield Kernel("sign_pack", 4 * count + 8 * words, [bits], lambda: ops.sign_pack(grad, bits))
    yield Kernel(
        "sign_offer",
        8 * count + 8 * words,
        [bits, sums],
        lambda: ops.sign_offer_all([grad], [residual], [bits], None, [_ROW], key=key, sums=[sums]),
    )
    yield Kernel(
        "exponential_encode",
        5 * count,
        [mine],
        lambda: ops.exponential_encode_all([grad], [norm], [count], [mine], key, **rule),
    )
    yield Kernel(
        "exponential_decode",
        5 * count,
        [out],
        lambda: ops.exponential_decode_all([codes], [norm], [count], [out], **rule, scale=0.3),
    )
    yield Kernel("dense_add", 12 * count, [out], lambda: ops.dense_add(out.zero_(), grad))


def _record(kernel: Kernel, repeat: int) -> dict[str, Any]:
    import statistics  # takes a while, and every start of the command imports this module

    import torch

    from ..ops.dispatch import by_reference

    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        kernel.run()
        seconds.append(time.perf_counter() - start)
    found = [array.clone() for array in kernel.out]
    with by_reference():
        kernel.run()
    # Elements that are not the same bits.
    integers = {8: torch.int64, 4: torch.int32, 1: torch.uint8}
    pairs = zip(found, kernel.out, strict=True)
    wrong = sum(int((a.view(kind) != b.view(kind)).sum()) for a, b in pairs for kind in [integers[a.element_size()]])
    median = statistics.median(seconds)
    rate = kernel.bytes_moved / median
    return {
        "bench": "kernels",
        "name": kernel.name,
        "bytes": kernel.bytes_moved,
        "median_seconds": median,
        "min_seconds": min(seconds),
        "repeats": repeat,
        "bytes_per_second": rate,
        "wrong": wrong,
    }


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hvd-compress bench kernels",
        description=_KERNELS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--count", type=int, default=_ELEMENTS, help="float32 elements (default 1 million)")
    parser.add_argument("--repeat", type=int, default=_REPEAT, help="measurements of each (default 9)")
    options = parser.parse_args(arguments)
    if not 1 <= options.count <= _MOST_ELEMENTS or options.repeat < 1:
        parser.error(f"--count should be from 1 to {_MOST_ELEMENTS}, and --repeat at least 1")
    return options
