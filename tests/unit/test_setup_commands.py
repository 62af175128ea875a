"""Commands of `make setup`: their logs, their failures, and that none outlives it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import setup_env
from environment import steps
from environment.lanes import side_by_side
from horovod_compress.building.advice import advice, excerpt, first_error
from horovod_compress.building.logged_command import StepFailed, Stopped
from tests.support.setup import make_runner

SECONDS = 60.0  # that anything here may take on a busy machine


def is_over(process: int) -> bool:
    """Whether a process has ended; an orphan may wait a moment for init to collect it."""
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for(path: Path) -> str:
    """The text of a file that another process is about to write."""
    deadline = time.monotonic() + SECONDS
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"{path.name} was not written"
        time.sleep(0.01)
    return path.read_text()


def sleeper(folder: Path) -> list[str]:
    """A command with a child, which write down that they run."""
    return ["sh", "-c", f"sleep 300 & echo $! > {folder}/child; echo ready; wait"]


# ---- logs ---------------------------------------------------------------------------------------


def test_each_phase_has_its_log_and_the_terminal_has_none_of_it(tmp_path, capsys):
    runner = make_runner(tmp_path)
    runner.run(["sh", "-c", "echo one; echo two >&2"], phase="horovod")
    runner.run(["sh", "-c", "printf three"], phase="horovod")
    runner.run(["sh", "-c", "echo four"], phase="kernels")
    log = runner.log("horovod").read_text()
    assert [word in log for word in ("one", "two", "three", "four")] == [True, True, True, False]
    assert "four" in runner.log("kernels").read_text()
    assert "two" not in capsys.readouterr().out


def test_log_is_that_of_the_last_run(tmp_path):
    for word in ("first", "second"):
        make_runner(tmp_path).run(["echo", word], phase="horovod")
    assert "first" not in make_runner(tmp_path).log("horovod").read_text()


# ---- failures -----------------------------------------------------------------------------------


def test_failure_shows_what_matters_and_what_to_do(tmp_path):
    runner = make_runner(tmp_path)
    noise = "for i in $(seq 100); do echo noise; done"
    script = f"{noise}; echo 'x.cpp:1: fatal error: omp.h: No such file or directory'; echo why; {noise}; exit 7"
    with pytest.raises(StepFailed) as failed:
        runner.run(["sh", "-c", script], phase="horovod")
    title, _, first, second, *_, remedy, more, again, log = str(failed.value).splitlines()
    assert title.startswith("make setup failed while building Horovod (exit status 7)")
    assert first == "  | x.cpp:1: fatal error: omp.h: No such file or directory" and second == "  | why"
    assert str(failed.value).count("noise") < 12
    assert "development package" in remedy + more
    assert again.startswith("Then run make setup again")
    assert log == f"Full log: {runner.log('horovod')}"


@pytest.mark.parametrize(
    ("line", "status", "remedy"),
    [
        ("x.cpp:9:1: fatal error: error writing to /tmp/x.s: No space left on device", 1, "disk is full"),
        ("OSError: [Errno 28] No space left on device", 2, "disk is full"),
        ("g++: fatal error: Killed signal terminated program cc1plus", 1, "JOBS=1"),
        ("", -9, "JOBS=1"),
        ("bind.h:6:10: fatal error: Python.h: No such file or directory", 1, "python3-dev"),
        ("a.cpp:2:10: fatal error: concepts: No such file or directory", 1, "header is missing"),
        ("  NewConnectionError('<pip._vendor.urllib3>: Temporary failure in name resolution')", 1, "PIP_INDEX_URL"),
        ("SSLError(SSLCertVerificationError(1, 'certificate verify failed'))", 1, "PIP_CERT"),
        ("ERROR: No matching distribution found for torch==2.99", 1, "TORCH=torch==VERSION"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", 1, "cache purge"),
        ("error: [Errno 13] Permission denied: '/src/build'", 1, "chown"),
        ("x.cpp:3:5: error: expected ';' before 'return'", 1, "first error is usually the cause"),
    ],
)
def test_each_cause_has_its_advice(line, status, remedy):
    assert remedy in " ".join(advice(["Collecting things", line, "make: *** [all] Error 2"], status).split())


def test_first_error_is_no_remark_of_cmake():
    lines = ["-- Could NOT find NVTX (missing: NVTX_INCLUDE_DIR)", "x.cc:3: error: no", "make: *** [x.o] Error 1"]
    assert first_error(lines) == 1
    assert excerpt(lines) == lines[1:]


def test_colours_are_left_out(tmp_path):
    runner = make_runner(tmp_path)
    with pytest.raises(StepFailed, match=r"\| x.cc: error: no"):
        runner.run(["sh", "-c", "printf 'x.cc: \\033[1;31merror\\033[m: no\n'; exit 1"], phase="horovod")


def test_end_is_shown_where_nothing_looks_like_an_error():
    assert excerpt(["one", "two"], last=1) == ["two"]
    assert excerpt([]) == []


def test_full_disk_of_our_own_is_explained_too(monkeypatch, capsys, tmp_path):
    def fill(setup: steps.Setup) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "horovod-0.28.1")

    monkeypatch.setattr(steps, "ROOT", tmp_path)
    monkeypatch.setattr(steps.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(steps.Setup, "run", fill)
    assert steps.run_from_command_line(["--venv", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "horovod-0.28.1" in said and "disk is full" in said


# ---- side by side -------------------------------------------------------------------------------


def test_lanes_run_at_the_same_time(tmp_path):
    meeting = threading.Barrier(2, timeout=SECONDS)
    side_by_side(meeting.wait, meeting.wait, stop=lambda: None)


def test_failure_of_one_lane_ends_the_command_of_the_other(tmp_path):
    runner = make_runner(tmp_path)
    ended: list[BaseException] = []

    def long() -> None:
        try:
            runner.run(sleeper(tmp_path), phase="horovod")
        except Stopped as stopped:
            ended.append(stopped)
            raise

    def failing() -> None:
        wait_for(tmp_path / "child")
        runner.run(["sh", "-c", "echo error: broken; exit 3"], phase="kernels")

    with pytest.raises(StepFailed, match="compiling kernels"):
        side_by_side(long, failing, stop=runner.stop)
    assert len(ended) == 1
    assert is_over(int(wait_for(tmp_path / "child")))
    with pytest.raises(Stopped):
        runner.run(["true"], phase="package")


def test_interrupt_ends_the_children_too(tmp_path, monkeypatch):
    runner = make_runner(tmp_path)

    def interrupt() -> None:
        if (tmp_path / "child").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "check", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runner.run(sleeper(tmp_path), phase="horovod")
    assert is_over(int(wait_for(tmp_path / "child")))


def test_an_interrupt_before_all_lanes_have_begun_stops_those_that_have(monkeypatch):
    stopped, found = threading.Event(), []
    submit = ThreadPoolExecutor.submit

    def interrupted(pool, lane):
        if lane is second:
            raise KeyboardInterrupt
        return submit(pool, lane)

    def first():
        found.append(stopped.wait(SECONDS))

    def second():
        raise AssertionError("never begins")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(first, second, stop=stopped.set)
    assert found == [True]


_TWO_LANES = """
import pathlib, signal, sys
from environment import steps
folder = pathlib.Path(sys.argv[1])
for number in (signal.SIGHUP, signal.SIGTERM):  # the tests may have been started where they are ignored
    signal.signal(number, signal.SIG_DFL)

def lane(self, phase):
    script = f"sleep 300 & echo $! > {folder}/{phase}; wait"
    self.runner.run(["sh", "-c", script], phase=phase)

steps.ROOT = folder
steps.Setup.run = lambda self: steps.side_by_side(
    lambda: lane(self, "horovod"), lambda: lane(self, "kernels"), stop=self.runner.stop)
sys.exit(steps.run_from_command_line(["--venv", str(folder / ".venv")]))
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_signal_ends_both_lanes_and_says_how_to_go_on(tmp_path, number):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, Path(setup_env.__file__).parents[:2]))}
    command = [sys.executable, "-c", _TWO_LANES, str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    children = [int(wait_for(tmp_path / phase)) for phase in ("horovod", "kernels")]
    process.send_signal(number)
    try:
        _, said = process.communicate(timeout=SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130 and "make setup was interrupted; run it again" in said
    assert [is_over(child) for child in children] == [True, True]
