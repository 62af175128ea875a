"""What the verbs share: the launcher of ranks, tables, how arguments are refused, and how a command is ended."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

LAUNCHERS = ("horovodrun", "torchrun")
#: What a rank has in its environment, by its launcher.
_MARKS = {"horovodrun": ("HOROVOD_RANK",), "torchrun": ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
#: The compiled modules, which an ImportError names that does not find them or cannot load them.
KERNELS = ("horovod_compress._cpu", "horovod_compress._cuda")
_NEEDS = {
    "horovodrun": "Horovod cannot be imported: {}; give --launcher torchrun to run without it",
    "torchrun": "PyTorch cannot be imported: {}; pip install torch",
}


def add_launcher(parser: argparse.ArgumentParser) -> None:
    """Add the choice of a launcher."""
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        help="which front to use: Horovod, or DistributedDataParallel (default: the launcher that started this "
        "command; else horovodrun if Horovod is installed, else torchrun)",
    )


def started_by(environment: Mapping[str, str] = os.environ) -> str:
    """Return the launcher that has started this process as a rank, empty if none has."""
    return next((name for name in LAUNCHERS if all(mark in environment for mark in _MARKS[name])), "")


def chosen_launcher(asked: str | None) -> str:
    """Return the launcher to use."""
    return asked or started_by() or ("horovodrun" if _has_horovod() else "torchrun")


def _has_horovod() -> bool:
    try:
        return importlib.util.find_spec("horovod") is not None
    except ImportError:
        return False


def module_of(launcher: str, name: str, front: str = "") -> Any:
    """Return a module of a launcher's front.

    Args:
        front: for models that ``fully_shard`` divides, "fsdp".

    Raises:
        ImportError: says what is missing.
    """
    front = front or ("horovod" if launcher == "horovodrun" else "torch_dist")
    try:
        return importlib.import_module(f"horovod_compress.fronts.{front}.{name}")
    except ImportError as error:
        if error.name in KERNELS:
            raise
        raise ImportError(_NEEDS[launcher].format(error)) from None


def ranks_of(launcher: str, front: str = "") -> Any:
    """Join the job that this process is a rank of, and return its ranks.

    Raises:
        ImportError: says what is missing.
    """
    return module_of(launcher, "ranks", front).begin()


def refuse(verb: str, problem: str) -> int:
    """Print what is wrong with a command, and return its exit status."""
    print(f"hvd-compress {verb}: {problem}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Let SIGTERM and SIGHUP clean up as Ctrl-C does: ranks that were started, or folders, would stay otherwise."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    # Not where nohup ignores it, nor in a rank: its launcher sees to the rest, and a wait for others would delay it.
    heeded = [number for number in signals if signal.getsignal(number) == signal.SIG_DFL and not started_by()]
    if threading.current_thread() is not threading.main_thread():
        heeded = []

    def end(number: int, frame: object) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_IGN)  # timeout(1) sends it twice
        sys.exit(128 + number)

    for number in heeded:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, signal.SIG_DFL)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return aligned text; the first ``left`` columns are words, the others numbers."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join([line(headings), "  ".join("-" * width for width in widths), *map(line, rows)])


def milliseconds(seconds: float | None) -> str:
    """Return a time with three digits, "-" for None."""
    if seconds is None:
        return "-"
    value = 1000 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
