"""SIGTERM and SIGHUP end a command as Ctrl-C does: what it has started ends, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import ALONE

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "import signal\nfor number in (1, 15): signal.signal(number, signal.SIG_DFL)\n"
COMMAND = """
import sys, time
from horovod_compress.cli import check_build, command

def run(parsed):
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("cleaning up", flush=True)
        sys.stdin.readline()
        print("clean", flush=True)

check_build.run = run
sys.exit(command.main(["--check-build"]))
"""
JOB = """
import sys
from pathlib import Path
from benchmarks import horovodrun

class Job(horovodrun.Job):
    def command(self):
        return ["sh", "-c", "setsid sleep 300 & echo $!; wait"]

horovodrun.GRACE_SECONDS = 0.1
horovodrun.run(Job("a", 1, [], Path(sys.argv[1]), 60.0), lambda line: print(line, flush=True))
"""


def started(script: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + script, *words],
        cwd=ROOT,
        env=ALONE | {"PATH": os.environ["PATH"]} | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_cleans_up(number: signal.Signals) -> None:
    """Once: timeout(1) sends the signal to the command, and then to its group."""
    with started(COMMAND) as command:
        assert command.stdout and command.stdin
        assert command.stdout.readline() == "begun\n"
        command.send_signal(number)
        assert command.stdout.readline() == "cleaning up\n"
        command.send_signal(number)
        assert command.communicate("go on\n", timeout=60)[0] == "clean\n"
    assert command.returncode == 128 + number


def test_a_rank_ends_at_once() -> None:
    """Its launcher waits for it, while it may wait for other ranks."""
    with started(COMMAND, HOROVOD_RANK="0") as command:
        assert command.stdout
        assert command.stdout.readline() == "begun\n"
        command.send_signal(signal.SIGTERM)
        assert command.communicate(timeout=60)[0] == ""
    assert command.returncode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_benchmark_ends_its_ranks(number: signal.Signals, tmp_path: Path) -> None:
    """Each of which is in a session of its own, as under horovodrun."""
    script = "signal.signal(2, signal.default_int_handler)\n" + JOB
    with started(script, str(tmp_path / "log")) as benchmark:
        assert benchmark.stdout
        rank = psutil.Process(int(benchmark.stdout.readline()))
        try:
            benchmark.send_signal(number)
            assert benchmark.wait(60) != 0
            _, alive = psutil.wait_procs([rank], 10.0)
            assert not alive
        finally:
            if rank.is_running():
                os.kill(rank.pid, signal.SIGKILL)
