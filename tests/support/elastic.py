"""Elastic jobs of Horovod's on this machine, whose hosts change while they run.

python -m tests.support.elastic [METHOD] prints how long a change takes; without a method, of Horovod alone.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .jobs import ROOT, kill_marked

#: Names of this machine, each of which Horovod takes for a host: where a rank fails, its host is given up whole.
#: The last four are ways to write 127.0.0.1.
HOSTS = ("localhost", "127.0.0.1", socket.gethostname(), "127.1", "127.0.1", "127.00.1", "127.0.00.1")


@dataclass(frozen=True)
class ElasticJob:
    """How a job ended.

    Attributes:
        status: the exit status of the launcher, None if the bound of time had to end it.
        ends: what each rank reported that came to its end.
        steps: what each process has noted of its steps.
        lives: the same, and of the states in which it began to train, at first and after each reset.
    """

    status: int | None
    output: str
    ends: list[dict[str, Any]]
    steps: list[list[dict[str, Any]]]
    lives: list[list[dict[str, Any]]]


def run_elastic(
    folder: Path,
    script: Path,
    hosts: Sequence[str],
    seconds: float = 120.0,
    env: Mapping[str, str] | None = None,
    **case: Any,
) -> ElasticJob:
    """Run a script under ``horovodrun``, with hosts that it may change: they are lines of a file in its folder.

    Args:
        hosts: with which it begins, as "localhost:2".
        case: plain data for the script.
    """
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    discovery = folder / "hosts.sh"
    discovery.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    discovery.chmod(0o700)
    number = sum(int(host.partition(":")[2] or 1) for host in hosts)
    mark = uuid.uuid4().hex
    settings = {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HVC_TEST_JOB": mark, "HVC_TEST_FOLDER": str(folder),
        "HVC_TEST_ARGUMENTS": json.dumps(case),
    }  # fmt: skip
    launcher = [sys.executable, str(Path(sys.executable).with_name("horovodrun")), "--gloo"]
    sizes = ["-np", str(number), "--min-np", "1", "--network-interface", "lo"]
    command = [*launcher, *sizes, "--host-discovery-script", str(discovery), sys.executable, str(script)]
    status: int | None = None
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command, env=os.environ | settings | dict(env or {}), stdout=output, stderr=subprocess.STDOUT, cwd=ROOT
        )  # fmt: skip
        try:
            status = _await(process, folder, seconds)
        finally:
            kill_marked(mark)
            process.wait(10)
    ends = [json.loads(path.read_text()) for path in sorted(folder.glob("end.*"))]
    lives = [[json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("steps.*"))]
    steps = [[note for note in notes if not note["begins"]] for notes in lives]
    return ElasticJob(status, (folder / "output").read_text(errors="replace"), ends, steps, lives)


def _await(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> int | None:
    """Return the exit status once the job has ended: after a rank was killed, the launcher takes its time for that."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
        ends = sorted(folder.glob("end.*"))
        if ends and len(ends) == json.loads(ends[0].read_text() or "{}").get("world"):
            return 0
    return process.poll()


def seconds_of_changes(folder: Path, method: str | None) -> dict[str, float]:
    """Return how long it takes from a change of hosts to the next step: when one of three leaves, and comes back."""
    events = [
        {"step": 3, "hosts": ["localhost:2"], "world": 2},
        {"step": 6, "hosts": ["localhost:3"], "world": 3},
    ]
    script = ROOT / "tests" / "faults" / "jobs" / "resized.py"
    job = run_elastic(folder, script, ["localhost:3"], 200.0, trained=[{"method": method}], steps=8, events=events)
    assert job.status == 0, job.output
    ends = {note["step"]: note["at"] for note in max(job.steps, key=len)}
    changed = [float((folder / f"changed.{event['step']}").read_text()) for event in events]
    return {"removed": ends[4] - changed[0], "added": ends[7] - changed[1]}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for what, took in seconds_of_changes(Path(made), (sys.argv[1:] or [None])[0]).items():
            print(f"a rank is {what}: {took:.1f} s to the next step")
