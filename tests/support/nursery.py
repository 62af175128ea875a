"""Jobs whose ranks are forks of one process, for both fronts.

A rank that is forked has nothing to import, and no launcher is beside it: half a minute of a core for ten jobs. And
``horovodrun`` kills all ranks as soon as one dies, where a survivor could tell what it saw. So these jobs take only the
rendezvous server from Horovod's launcher. Ranks of one job hash strings alike, which those of a launcher do not: what
depends on the order of a set is for :func:`.jobs.run_ranks` with a launcher to find.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .launch import free_port, of_all, of_one
from .yields import sleeping_yields

ROOT = Path(__file__).resolve().parents[2]
MARK = "HVC_TEST_JOB"  # in the environment of every process of a job, to find them again

_MOST_RANKS = 4  # of the jobs here; all are forks of one process, which has one environment


@dataclass(frozen=True)
class Rank:
    """How one rank ended.

    Attributes:
        status: of its exit, negative for a signal, None if the bound of time ended it.
        seconds: how long it lived.
        at: when it ended, on the monotonic clock.
        output: what it printed, to either stream.
        report: what it reported, None if it did not.
        marks: the texts that it left with ``mark``.
        pid: of its process.
    """

    number: int
    status: int | None
    seconds: float
    at: float
    output: str
    report: Any
    marks: dict[str, str]
    pid: int


class Nursery:
    """Starts jobs, one after the other.

    Args:
        jobs: the folder of their scripts.
    """

    def __init__(self, jobs: Path) -> None:
        import marked_processes  # of the tools, which only pytest has on its path, and no longer when a process ends

        self._jobs, self._mark, self._kill_marked = jobs, uuid.uuid4().hex, marked_processes.kill_marked
        self._process: subprocess.Popen[str] | None = None

    def run(
        self,
        world: int,
        script: str | Path,
        arguments: Mapping[str, Any],
        *,
        victims: Collection[int] = (),
        bound: float = 40.0,
        patience: float | None = None,
        env: Mapping[str, str] | None = None,
        fronts: Collection[str] = ("horovod", "torch"),
    ) -> list[Rank]:
        """Run a script of the folder on ``world`` ranks, and say how each ended.

        Args:
            victims: ranks that are not waited for; they are killed when the others have ended.
            bound: seconds, after which all are killed.
            patience: seconds that the others have when one has failed; None for as many as there are.
            fronts: for which the environment of the ranks is; of both, a job chooses its own.
        """
        with tempfile.TemporaryDirectory(prefix="hvc-job-") as name, _environments(world, fronts) as environments:
            folder = Path(name)
            ours = settings() | {"HVC_TEST_FOLDER": name, "HVC_TEST_ARGUMENTS": json.dumps(dict(arguments))}
            common = os.environ | ours | {MARK: self._mark} | dict(env or {})
            ranks = [
                {"environment": common | environment, "output": str(folder / f"output.{number}")}
                for number, environment in enumerate(environments)
            ]
            job = {"script": str(self._jobs / script), "ranks": ranks, "victims": list(victims), "bound": bound}
            ends = self._ask(job | {"patience": bound if patience is None else patience})
            return [_rank(folder, number, end) for number, end in enumerate(ends)]

    def _ask(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Have a job run; if that is interrupted, no process is left."""
        process = self._started()
        assert process.stdin and process.stdout
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            found: list[dict[str, Any]] = json.loads(process.stdout.readline())
        except BaseException:
            self.close()
            raise
        return found

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | settings() | {MARK: self._mark} | sleeping_yields(_MOST_RANKS),
                cwd=ROOT,
                start_new_session=True,
            )
        return self._process

    def close(self) -> None:
        """End all processes; the next job starts anew."""
        if self._process is not None:
            self._kill_marked(MARK, self._mark)
            self._process.communicate()
            self._process = None


def settings() -> dict[str, str]:
    """Return what the environment of every rank has."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Ranks share the cores of one machine. Horovod's threads speak to each other in every cycle (ms), work or none.
    few = {"OMP_NUM_THREADS": "1", "HOROVOD_CYCLE_TIME": "2"}
    return {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **few}


@contextlib.contextmanager
def _environments(world: int, fronts: Collection[str]) -> Iterator[list[dict[str, str]]]:
    """Return what each rank's environment has of its launcher, while that is there."""
    found: list[dict[str, str]] = [{} for _ in range(world)]
    if "torch" in fronts:
        shared = of_all(world, free_port())
        found = [shared | of_one(number) for number in range(world)]
    if "horovod" not in fronts:
        yield found
        return
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    plan = get_host_assignments(parse_hosts(f"localhost:{world}"), world)
    run = create_run_env_vars("127.0.0.1", ["lo"], server.start())
    server.init(plan)
    try:
        slots = [run | create_slot_env_vars(slot) for slot in plan]
        yield [
            mine | {name: str(value) for name, value in slot.items()} for mine, slot in zip(found, slots, strict=True)
        ]
    finally:
        server.stop()
        server._httpd.server_close()  # which stop() leaves to the garbage collector


def _rank(folder: Path, number: int, end: Mapping[str, Any]) -> Rank:
    report = folder / f"report.{number}"
    output = folder / f"output.{number}"
    return Rank(
        number,
        end["status"],
        end["seconds"],
        end["at"],
        output.read_text(errors="replace") if output.exists() else "",
        json.loads(report.read_text()) if report.exists() else None,
        {path.name.split(".")[1]: path.read_text() for path in folder.glob(f"mark.*.{number}")},
        end["pid"],
    )
