"""What a benchmark's job prints and leaves, the same wherever its ranks run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

_MARK = "@record "


class LinkBytes(NamedTuple):
    """What one host's link carried during a job, as the kernel counts Ethernet frames."""

    host: str
    sent: int
    received: int
    packets_sent: int
    packets_received: int
    dropped: int


class Outcome(NamedTuple):
    """What a job left.

    Attributes:
        lines: everything the ranks printed.
        records: what rank 0 printed after ``@record``, read as JSON.
        links: the bytes on each host's link; None where nobody counts them.
    """

    lines: list[str]
    records: list[dict[str, Any]]
    links: list[LinkBytes] | None


def emit(record: dict[str, Any]) -> None:
    """Print a record, for the launcher to find; rank 0 only."""
    print(_MARK + json.dumps(record), flush=True)


def records_in(lines: list[str]) -> list[dict[str, Any]]:
    """Return the records among a job's lines."""
    return [json.loads(line[len(_MARK) :]) for line in lines if line.startswith(_MARK)]


def environment() -> dict[str, str]:
    """Return what every rank's environment needs: one thread a rank, and this folder to import from."""
    path = os.environ.get("PYTHONPATH")
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{path}" if path else str(ROOT)}


@contextlib.contextmanager
def log_file(wanted: Path | None) -> Iterator[Path]:
    """Give a place for a job's log: the one that is wanted, or a temporary one that goes unless the job fails."""
    if wanted:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        yield wanted
        return
    folder = Path(tempfile.mkdtemp(prefix="horovod-compress-"))
    yield folder / "job.log"
    shutil.rmtree(folder, ignore_errors=True)
