"""Ranks on this machine that no launcher ends: whoever starts them sees how each of them ends.

``horovodrun`` kills all ranks as soon as one has died. To see what the others do, only the server through which ranks
find each other is taken from Horovod's launcher here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.02
#: What a rank finds its folder and its task by.
FOLDER, TASK = "HVC_RANK_FOLDER", "HVC_RANK_TASK"


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
    folder, rank = Path(os.environ[FOLDER]), os.environ["HOROVOD_RANK"]
    temporary = folder / f".{name}.{rank}"
    temporary.write_text(json.dumps(value))
    temporary.rename(folder / f"{name}.{rank}.json")  # a reader sees all of it or nothing


def run(module: str, world: int, what: Any, seconds: float, victims: Collection[int] = ()) -> list[End]:
    """Run a module as every rank of a job of its own, and say how each ended.

    Args:
        what: the task, as plain data.
        seconds: after which all that still run are killed.
        victims: ranks that need not end; they are killed when the others have.
    """
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    plan = get_host_assignments(parse_hosts(f"localhost:{world}"), world)
    with tempfile.TemporaryDirectory(prefix="hvc-ranks-") as name:
        folder = Path(name)
        common = create_run_env_vars("127.0.0.1", ["lo"], server.start()) | {FOLDER: name, TASK: json.dumps(what)}
        server.init(plan)
        started: list[subprocess.Popen[bytes]] = []
        try:
            for slot in plan:
                mine = {key: str(value) for key, value in (common | create_slot_env_vars(slot)).items()}
                started.append(_start(module, folder / f"output.{slot.rank}", mine))
            statuses = _watch(started, set(victims), seconds)
        finally:
            _kill(started)
            server.stop()
            server._httpd.server_close()  # which stop() leaves to the garbage collector
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
