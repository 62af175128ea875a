"""The network lab: hosts of their own, links with a limit, and nothing left behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.lab import Lab, LabError
from benchmarks.lab.needs import namespaces
from benchmarks.lab.rates import Rate
from benchmarks.launch import JobFailed

ROOT = Path(__file__).resolve().parents[2]
MEGABYTES = 2
PROBE = f"""
import os, socket, time, torch, torch.distributed as dist, horovod.torch as hvd
from benchmarks.launch import emit
hvd.init()
x = torch.ones({MEGABYTES * 250_000})
hvd.allreduce_(x, name="warm")
began = time.perf_counter()
hvd.allreduce_(x, name="x")
seconds = time.perf_counter() - began
own = socket.gethostbyname(socket.gethostname())
found = hvd.allgather_object((socket.gethostname(), own, hvd.local_size(), seconds), name="found")
if hvd.rank() == 0:
    emit({{"found": found}})
"""


def _refused() -> str:
    try:
        namespaces()
    except LabError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_refused()), reason=_refused())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test here ends with the network, the mounts and the processes it began with."""
    before = _traces()
    yield
    end = time.monotonic() + 10.0
    while _traces() != before and time.monotonic() < end:
        time.sleep(0.05)
    assert _traces() == before


def _traces() -> tuple[str, str, str, int]:
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    named = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    mounts = Path("/proc/self/mounts").read_text()
    return _names(links), named, mounts, len(_lab_processes())


def _names(links: str) -> str:
    return " ".join(line.split(":")[1] for line in links.splitlines())


def _lab_processes() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "benchmarks.lab.inside" in words or words[:2] == ["sleep", "infinity"]:
            found.append(process)
    return found


def test_hosts_are_hosts_and_links_have_their_rate() -> None:
    with Lab(3, "100mbit") as lab:
        outcome = lab.run("probe", ["-c", PROBE], 60)
        (record,) = outcome.records
        for number, (name, address, local_size, _) in enumerate(record["found"]):
            assert (name, address, local_size) == (f"lab{number}", f"10.77.0.{number + 1}", 1)
        # A ring sends 2 * 2/3 of the tensor over every link.
        limit = MEGABYTES * 1e6 * 4 / 3 * 8 / 100e6
        slowest = max(seconds for *_, seconds in record["found"])
        assert 0.95 * limit < slowest < 3 * limit
        assert outcome.links is not None and len(outcome.links) == 3
        for link in outcome.links:
            assert 2 * MEGABYTES * 4e6 / 3 < link.sent < 2.4 * MEGABYTES * 4e6 / 3

        lab.limit(None)  # the control: without the limit it is the limit that is gone
        (record,) = lab.run("probe", ["-c", PROBE], 60).records
        assert max(seconds for *_, seconds in record["found"]) < 0.5 * limit


def test_several_ranks_share_a_host() -> None:
    with Lab(3, slots=2) as lab:
        (record,) = lab.run("probe", ["-c", PROBE], 60).records
        assert [(name, size) for name, _, size, _ in record["found"]] == [("lab0", 2), ("lab0", 2), ("lab1", 1)]
        assert lab.describe()["hosts"] == 2


def test_a_job_that_fails_says_why_and_the_lab_goes_on() -> None:
    script = "import os, time\nif os.environ['HOROVOD_RANK'] == '1': raise ValueError('no such thing')\ntime.sleep(60)"
    with Lab(2) as lab:
        began = time.monotonic()
        with pytest.raises(JobFailed, match=r"probe: ValueError: no such thing .*rank 1: 1"):
            lab.run("probe", ["-c", script], 50)
        assert time.monotonic() - began < 30
        with pytest.raises(JobFailed, match="not done after 1 s"):
            lab.run("probe", ["-c", "import time; time.sleep(60)"], 1)
        assert lab.run("probe", ["-c", "print('fine')"], 20).lines == ["fine", "fine"]


def test_what_the_kernel_lacks_is_refused_in_words() -> None:
    with pytest.raises(LabError, match="congestion control nonsense is not allowed"):
        Lab(2, congestion="nonsense")
    try:
        with Lab(2, "1gbit", delay="20ms") as lab:  # kernels with netem
            assert lab.describe()["delay_seconds"] == 0.02
    except LabError as error:  # and those without
        assert "does not offer the queueing discipline netem" in str(error)


def test_two_labs_at_once() -> None:
    with Lab(2, "1gbit") as one, Lab(2, "100mbit") as other:
        code = ["-c", "import socket; print(socket.gethostbyname(socket.gethostname()))"]
        assert sorted(one.run("one", code, 20).lines) == sorted(other.run("other", code, 20).lines)
        one.limit(Rate.parse("10mbit"))
        assert other.describe()["rate"] == "100mbit"


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_half_way_and_started_again(sign: signal.Signals) -> None:
    """The fixture looks at what is left; here a job must be under way when the signal comes."""
    words = [sys.executable, "-m", "benchmarks.lab", "--ranks", "2", "--rate", "1gbit", "--", "-m", "tests.support.busy"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    assert len(_lab_processes()) >= 3
    os.kill(process.pid, sign)
    process.wait(30)
    process.stdout.close()
    assert process.returncode != 0
    with Lab(2, "1gbit") as lab:
        assert lab.run("again", ["-c", "print('fine')"], 20).lines == ["fine", "fine"]
