"""Jobs whose survivors can tell what they saw.

``horovodrun`` kills all ranks as soon as one dies. So these jobs take only the rendezvous server
from Horovod's launcher, and start the ranks themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
from horovod.runner.http.http_server import RendezvousServer

from tests.support.jobs import ROOT
from tests.support.launch import free_port
from tests.support.yields import sleeping_yields

JOBS = Path(__file__).parent / "jobs"

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
    """

    number: int
    status: int | None
    seconds: float
    at: float
    output: str
    report: Any
    marks: dict[str, str]


class Nursery:
    """Starts jobs, one after the other."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        settings = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(JOBS / "nursery.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | settings | sleeping_yields(_MOST_RANKS),
            start_new_session=True,
        )

    def run(
        self,
        world: int,
        script: str,
        arguments: Mapping[str, Any],
        *,
        victims: Collection[int] = (),
        bound: float = 40.0,
        env: Mapping[str, str] | None = None,
    ) -> list[Rank]:
        """Run a script of this folder's ``jobs`` on ``world`` ranks, and say how each ended.

        Args:
            victims: ranks that are not waited for; they are killed when the others have ended.
            bound: seconds, after which all are killed.
        """
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory(prefix="hvc-fault-") as name:
            folder = Path(name)
            server = RendezvousServer()
            plan = get_host_assignments(parse_hosts(f"localhost:{world}"), world)
            shared = create_run_env_vars("127.0.0.1", ["lo"], server.start())
            server.init(plan)
            shared |= {
                "HOROVOD_CYCLE_TIME": "0.5",
                "HVC_TEST_FOLDER": name,
                "HVC_TEST_ARGUMENTS": json.dumps(dict(arguments)),
            } | dict(env or {})
            # A job chooses its front: torch.distributed looks for these.
            shared |= {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
            ranks = [
                {
                    "environment": _environment(shared, slot),
                    "output": str(folder / f"output.{slot.rank}"),
                }
                for slot in plan
            ]
            job = {"script": str(JOBS / script), "ranks": ranks, "victims": list(victims), "bound": bound}
            try:
                self._process.stdin.write(json.dumps(job) + "\n")
                self._process.stdin.flush()
                ends = json.loads(self._process.stdout.readline())
            finally:
                server.stop()
                server._httpd.server_close()  # which stop() leaves to the garbage collector
            return [_rank(folder, number, end) for number, end in enumerate(ends)]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def _environment(shared: Mapping[str, Any], slot: Any) -> dict[str, str]:
    found = {**shared, **create_slot_env_vars(slot), "RANK": slot.rank, "LOCAL_RANK": slot.rank}
    return {name: str(value) for name, value in found.items()}


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
    )
