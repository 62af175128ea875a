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
from pathlib import Path

LEVELS = ("kernels", "allreduce", "training")


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
        print("hvd-compress bench: --json prints the records, --json FILE writes them; choose one", file=sys.stderr)
        return 2
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "__init__.py").is_file():
        return _installed(arguments, as_json=asked)
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


def _installed(arguments: argparse.Namespace, *, as_json: bool) -> int:
    """Run what an installed package has."""
    if arguments.level == "kernels":
        from .. import kernel_times

        return kernel_times.main(arguments.rest, as_json=as_json)
    print(
        f"hvd-compress bench {arguments.level}: this benchmark is not part of an installed package, which has only "
        "`hvd-compress bench kernels`; get the source of horovod-compress, run `make setup` in it, and run this "
        "command from there",
        file=sys.stderr,
    )
    return 2


def print_records(path: Path) -> None:
    """Print a benchmark's records, the header's command without the file that they were written to."""
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record.get("name") == "header":
            record["command"] = record["command"][:-2]  # --json and the path come last
        print(json.dumps(record))
