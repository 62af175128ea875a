"""Ranks on this machine that no launcher ends: whoever starts them sees how each of them ends.

``horovodrun`` and ``torchrun`` kill all ranks as soon as one has died. What the others do is seen here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.02
#: What a rank finds its folder, its task and its number by.
FOLDER, TASK, RANK = "HVC_RANK_FOLDER", "HVC_RANK_TASK", "HVC_RANK_NUMBER"


@dataclass(frozen=True)
class End:
    """How one rank ended.

    Attributes:
        status: of its exit, negative for a signal, None if the bound of time ended it.
        found: what it has written by :func:`leave`, by name.
        output: what it printed.
    """

    rank: int
    status: int | None
    found: Mapping[str, Any]
    output: str


def task() -> Any:
    """Return what this rank is to do."""
    return json.loads(os.environ[TASK])


def leave(name: str, value: Any) -> None:
    """Leave something for whoever started this rank; the last value of a name counts."""
    folder, rank = Path(os.environ[FOLDER]), os.environ[RANK]
    temporary = folder / f".{name}.{rank}"
    temporary.write_text(json.dumps(value))
    temporary.rename(folder / f"{name}.{rank}.json")  # a reader sees all of it or nothing


def run(
    module: str, ranks: Sequence[Mapping[str, str]], what: Any, seconds: float, victims: Collection[int] = ()
) -> list[End]:
    """Run a module as every rank of a job of its own, and say how each ended.

    Args:
        ranks: what each has in its environment, by which it finds the others.
        what: the task, as plain data.
        seconds: after which all that still run are killed.
        victims: ranks that need not end; they are killed when the others have.
    """
    with tempfile.TemporaryDirectory(prefix="hvc-ranks-") as name:
        folder = Path(name)
        common = {FOLDER: name, TASK: json.dumps(what)}
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank, own in enumerate(ranks):
                started.append(_start(module, folder / f"output.{rank}", {**common, **own, RANK: str(rank)}))
            statuses = _watch(started, set(victims), seconds)
        finally:
            _kill(started)
        return [_end(folder, rank, status) for rank, status in enumerate(statuses)]


def _start(module: str, output: Path, mine: Mapping[str, str]) -> subprocess.Popen[bytes]:
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # ranks share the processors
    with output.open("wb") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", module],
            env={**os.environ, **threads, **mine},
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )


def _watch(started: list[subprocess.Popen[bytes]], victims: set[int], seconds: float) -> list[int | None]:
    until = time.monotonic() + seconds
    expected = [process for rank, process in enumerate(started) if rank not in victims]
    while time.monotonic() < until and any(process.poll() is None for process in expected):
        time.sleep(_POLL_SECONDS)
    return [process.poll() for process in started]


def _kill(started: list[subprocess.Popen[bytes]]) -> None:
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def _end(folder: Path, rank: int, status: int | None) -> End:
    found = {path.name.split(".")[0]: json.loads(path.read_text()) for path in folder.glob(f"*.{rank}.json")}
    return End(rank, status, found, (folder / f"output.{rank}").read_text(errors="replace"))
