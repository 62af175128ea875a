"""Who does not belong to a job is not let in: while ranks connect it takes the right number, and later nobody may."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.faults import JOBS
from tests.support.jobs import ROOT, RunningJob, run_ranks

CONNECTS, SOON = 2_000, 0.3
SAID = {"silence": b"", "half a handshake": b"\0\0\0", "http": b"GET / HTTP/1.1\r\n\r\n", "zeros": bytes(7) + b"\1"}


class Besieged:
    """The job, from point to point."""

    def __init__(self, seconds: float = 30.0) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, str(JOBS / "besieged.py"), str(seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def next(self, at: str) -> dict[str, Any]:
        """Return what the ranks say at the next point; they wait there until :meth:`go_on`."""
        assert self.process.stdout
        lines = []
        for line in self.process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                assert found["at"] == at, found
                return found
            lines.append(line)
        raise AssertionError(f"the ranks ended with {self.process.wait()} before {at!r}\n{''.join(lines[-30:])}")

    def go_on(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):  # they are gone: `next` says how
            self.process.stdin.write("\n")
            self.process.stdin.flush()


@pytest.fixture
def ranks() -> Iterator[Besieged]:
    made = Besieged()
    yield made
    made.process.kill()
    made.process.communicate()


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Let this process have enough of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < CONNECTS + 500:
        pytest.skip(f"needs {CONNECTS + 500} descriptors, ulimit -Hn is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def held() -> Iterator[list[socket.socket]]:
    """The strangers' ends, which stay open as long as the test takes."""
    made: list[socket.socket] = []
    yield made
    for one in made:
        one.close()


def knock(held: list[socket.socket], ports: Sequence[int], times: int, data: Sequence[bytes]) -> None:
    """Connect to each of the ports in turn, say something where that is possible, and stay."""
    for number in range(times):
        one = socket.socket()
        one.setblocking(False)
        held.append(one)
        with contextlib.suppress(OSError):  # in progress, or refused
            one.connect(("127.0.0.1", ports[number % len(ports)]))
        if text := data[number % len(data)]:
            with contextlib.suppress(OSError):
                one.send(text)


def reached(port: int) -> bool:
    """Return whether anybody can connect."""
    try:
        socket.create_connection(("127.0.0.1", port), SOON).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("who", ["all", "silence", "others"])
def test_many_strangers_take_no_descriptor(
    ranks: Besieged, descriptors: None, held: list[socket.socket], who: str
) -> None:
    """Neither before the ranks have connected nor after, on either port of either rank."""
    data = {"all": [*SAID.values()], "silence": [SAID["silence"]], "others": [*SAID.values()][1:]}[who]
    for _ in range(2):  # the ranks connect twice: what exchanges, and what notes on failures go over
        found = ranks.next("addresses")
        knock(held, found["ports"], CONNECTS // 2, data)
        time.sleep(0.1)
        ranks.go_on()
    found = ranks.next("connected")
    assert found["right"] and len(found["ports"]) == 4 and found["descriptors"] < 60, found
    assert not any(map(reached, found["ports"]))
    knock(held, found["ports"], CONNECTS, data)
    time.sleep(0.1)
    ranks.go_on()
    after = ranks.next("after")
    assert after["right"] and after["said"] == {"0": "word"} and after["descriptors"] == found["descriptors"], after
    ranks.go_on()
    closed = ranks.next("closed")
    assert not closed["ports"]


@pytest.mark.slow
@pytest.mark.parametrize("says", [b"", bytes(10_000)], ids=["silence", "zeros"])
@pytest.mark.parametrize("first", [True, False])
def test_who_guesses_a_number_is_not_taken_for_a_rank(held: list[socket.socket], first: bool, says: bytes) -> None:
    """The start fails, in the time that ranks have to connect; the rank that it keeps out may try for 30 s more."""
    ranks = Besieged(6.0)
    try:
        if not first:
            ranks.next("addresses")
            ranks.go_on()
        for port in ranks.next("addresses")["ports"]:
            for number in range(2):
                knock(held, [port], 1, [number.to_bytes(8, "little") + says])
        time.sleep(0.1)
        ranks.go_on()
        told = r"somebody outside the job has (connected in|taken its) place|: not all of 2 ranks connected"
        with pytest.raises(AssertionError, match=told):
            ranks.next("connected")
    finally:
        ranks.process.kill()
        ranks.process.communicate()


@pytest.mark.slow
def test_control(ranks: Besieged) -> None:
    """Nobody knocks: as many descriptors, and the ports are open while ranks connect."""
    known: set[int] = set()
    for _ in range(2):
        found = set(ranks.next("addresses")["ports"])
        assert len(found - known) == 2 and all(map(reached, found - known)) and not any(map(reached, known))
        known |= found
        ranks.go_on()
    at = ranks.next("connected")
    assert at["right"] and at["descriptors"] < 60


@pytest.mark.slow
@pytest.mark.parametrize("front", ["horovod", "torch"])
def test_a_training_job_loses_no_rank(descriptors: None, held: list[socket.socket], front: str) -> None:
    """With few descriptors, and as many strangers while it trains."""

    def during(job: RunningJob) -> None:
        ports = [port for rank in range(2) for port in json.loads(job.wait_mark("ports", rank, 90.0))]
        assert len(ports) == 4 and not any(map(reached, ports))
        knock(held, ports, CONNECTS, list(SAID.values()))
        (job.folder / "go").touch()

    def calm(job: RunningJob) -> None:
        (job.folder / "go").touch()

    jobs = [
        run_ranks(2, JOBS / "few_descriptors.py", front=front, during=how, timeout=100).reports
        for how in (calm, during)
    ]
    assert jobs[0] == jobs[1] and jobs[0][0]["weights"] == jobs[0][1]["weights"]
