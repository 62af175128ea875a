"""The network lab: hosts of their own, links with a limit, and nothing left behind, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.lab import Lab, LabError
from benchmarks.lab.rates import Rate
from benchmarks.lab.relay import Relay
from benchmarks.launch import JobFailed
from tests.support.marks import needs_lab, slow

ROOT = Path(__file__).resolve().parents[2]
MEGABYTES = 2
PROBE = f"""
import os, socket, time, torch, torch.distributed as dist, horovod.torch as hvd
from benchmarks.outcomes import emit
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


pytestmark = [pytest.mark.alone, needs_lab()]


@pytest.fixture(autouse=True)
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark the processes that a test starts, and see to it that none is left, and no trace in the network."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("HVC_TEST_MARK", mark)
    before = _network()
    yield mark
    end = time.monotonic() + 10.0
    while _marked(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _marked(mark)
    assert _network() == before


def _network() -> tuple[bool, str]:
    """Return whether this network has links of a lab, and what is mounted over files in /etc."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return "switch" in links or "port0" in links, "".join(line for line in mounts if " /etc/" in line)


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes of a test's labs, this one apart."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid != os.getpid() and process.environ().get("HVC_TEST_MARK") == mark:
                found.append(process)
    return found


@pytest.mark.slow
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


@pytest.mark.slow
def test_several_ranks_share_a_host() -> None:
    with Lab(3, slots=2) as lab:
        (record,) = lab.run("probe", ["-c", PROBE], 60).records
        assert [(name, size) for name, _, size, _ in record["found"]] == [("lab0", 2), ("lab0", 2), ("lab1", 1)]
        assert lab.describe()["hosts"] == 2


@pytest.mark.slow
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
    with pytest.raises(LabError, match=r"cannot be delayed, as .*No such device.*leave the delay out"):
        Relay(["port-of-nothing"], 0.1)


ROUND_TRIP = """
import os, socket, time
rank, tries = int(os.environ["HOROVOD_RANK"]), 10
if rank == 1:
    with socket.create_server(("", 7654)) as server:
        there, _ = server.accept()
        for _ in range(tries):
            there.sendall(there.recv(1))
else:
    end = time.monotonic() + 20
    while True:
        try:
            here = socket.create_connection(("lab1", 7654), timeout=5)
            break
        except ConnectionRefusedError:
            assert time.monotonic() < end
            time.sleep(0.05)
    seconds = []
    for _ in range(tries):
        began = time.perf_counter()
        here.sendall(b"x")
        here.recv(1)
        seconds.append(time.perf_counter() - began)
    print(min(seconds))
"""


@pytest.mark.parametrize("delay", [0.1, *slow(0.3)])
def test_a_packet_is_late_once_on_its_way(delay: float) -> None:
    with Lab(2, "100mbit", delay=f"{delay * 1e3:.0f}ms") as lab:
        assert lab.describe()["delay_seconds"] == delay
        assert lab.describe()["delayed_by"] in ("netem", "relay")
        (late,) = map(float, lab.run("late", ["-c", ROUND_TRIP], 50).lines)
        assert 2 * delay <= late < 4 * delay
        if delay > 0.1:  # the control, in the same lab: the way is free again
            lab.limit(None)
            (soon,) = map(float, lab.run("soon", ["-c", ROUND_TRIP], 50).lines)
            assert soon < delay and lab.describe()["delayed_by"] is None


@pytest.mark.slow
def test_two_labs_at_once() -> None:
    with Lab(2, "1gbit") as one, Lab(2, "100mbit") as other:
        code = ["-c", "import socket; print(socket.gethostbyname(socket.gethostname()))"]
        assert sorted(one.run("one", code, 20).lines) == sorted(other.run("other", code, 20).lines)
        one.limit(Rate.parse("10mbit"))
        assert other.describe()["rate"] == "100mbit"


@pytest.mark.slow
def test_a_job_is_stopped_at_once_and_its_words_are_not_the_next_one_s() -> None:
    with Lab(2) as lab:
        place = {"ranks": 2, "slots": 1, "environment": {}, "limit": 60.0}
        lab._job += 1
        lab._tell(do="run", job=lab._job, words=[sys.executable, "-c", "import time; time.sleep(60)"], **place)
        began = time.monotonic()
        lab._stop()
        assert time.monotonic() - began < 15
        assert lab.run("next", ["-c", "print('fine')"], 20).lines == ["fine", "fine"]


@pytest.mark.slow
def test_what_a_rank_leaves_running_ends_with_the_job(mark: str) -> None:
    script = "import subprocess; subprocess.Popen(['sleep', '1234']); print('left one')"
    with Lab(2) as lab:
        assert lab.run("leaver", ["-c", script], 20).lines == ["left one"] * 2
        assert not [process for process in _marked(mark) if "1234" in process.cmdline()]


def test_half_an_order_and_stray_words_do_no_harm(mark: str) -> None:
    with Lab(1) as lab:
        assert _marked(mark)
        assert lab._process.stdin is not None
        lab._process.stdin.write('{"do": "lim')  # what is left of somebody who died in the middle of it
    # The fixture sees that the lab is gone; an order in full is the control of all other tests.


def _heed_interrupts() -> None:
    """Undo what a shell does to programs that it starts in the background: they would inherit it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("sign", [signal.SIGTERM, *slow(signal.SIGKILL, signal.SIGINT)])
def test_killed_half_way_and_started_again(sign: signal.Signals, mark: str) -> None:
    """The fixture looks at what is left; here a job must be under way when the signal comes."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.lab",
        "--ranks",
        "2",
        "--rate",
        "1gbit",
        "--",
        "-m",
        "tests.support.busy",
    ]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=_heed_interrupts,  # noqa: PLW1509  no thread runs yet  # noqa: PLW1509  no other thread runs here
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            assert process.stdout.readline() == "busy\n"
            assert len(_marked(mark)) >= 5  # the lab, two hosts and two ranks at least
            os.kill(process.pid, sign)
            assert process.wait(30) != 0
    finally:
        process.kill()
        process.wait()
    with Lab(2, "1gbit") as lab:
        assert lab.run("again", ["-c", "print('fine')"], 20).lines == ["fine", "fine"]


# ---- the demo, which trains in a lab ----------------------------------------------------------

DEMO = [sys.executable, "examples/demo.py", "--quick", "--methods", "horovod-none,marsit", "--where", "lab"]


@pytest.mark.slow
def test_the_demo_compares_methods_on_a_slow_link(tmp_path: Path) -> None:
    words = [*DEMO, "--json", "--out", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    stock, marsit = summary["records"]
    assert [run["place"]["rate"] for run in (stock, marsit)] == ["100mbit"] * 2
    assert stock["ranks_identical"] and marsit["ranks_identical"]
    # The link holds a float32 step back for as long as its bytes take, whatever the machine does.
    assert stock["step_seconds"]["median"] > 0.95 * stock["stats"]["bytes_sent"] / stock["stats"]["steps"] * 8 / 100e6
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_demo_killed_half_way_leaves_nothing(sign: signal.Signals, mark: str, tmp_path: Path) -> None:
    """The fixture looks at what is left; here a job must be training when the signal comes."""
    process = subprocess.Popen(
        [*DEMO, "--out", str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_heed_interrupts,  # noqa: PLW1509  no thread runs yet
    )
    assert process.stderr is not None
    log = tmp_path / "text-horovod-none.log"
    try:
        with process.stderr:
            while not (log.exists() and "step 1/" in log.read_text()):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            assert len(_marked(mark)) >= 5  # the lab, two hosts and two ranks at least
            os.kill(process.pid, sign)
            assert process.wait(60) != 0
            assert sign == signal.SIGKILL or "Next:" not in process.stderr.read()
    finally:
        process.kill()
        process.wait()
