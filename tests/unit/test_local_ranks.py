"""Ranks that a process starts by forking: each has its own environment, and how it ended is known."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from horovod_compress.fronts import local_ranks

#: Starts ranks, and says who they are. They would go on for two minutes.
CALLER = """
import signal
from horovod_compress.fronts import local_ranks

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told tests to ignore it

def look(left):
    if all("pids" in each for each in left):
        print(*[each["pids"][0] for each in left], left[0]["pids"][1], flush=True)

local_ranks.run("ranks_of_a_test", [{"OWN": "0"}, {"OWN": "1"}], "orphan", 120.0, look=look)
"""
MODULE = """
import os, signal, time
from horovod_compress.fronts import local_ranks

def become():
    rank, what = os.environ["OWN"], local_ranks.task()
    print("rank", rank, "says", what, flush=True)
    local_ranks.leave("pids", [os.getpid(), os.getppid()])
    if what == "raise" and rank == "1":
        raise ValueError("no luck")
    if what == "signal" and rank == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "freeze" and rank == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    while what == "freeze" and not os.path.exists(os.path.join(os.environ[local_ranks.FOLDER], "pids.1.json")):
        time.sleep(0.01)
    if what == "wait":
        time.sleep(0.6)
    if what == "orphan":
        time.sleep(120.0)
    local_ranks.leave("end", rank)
    os._exit(0)

print("a plug-in says hello", flush=True)
local_ranks.serve(become)
"""
RANKS = [{"OWN": "0"}, {"OWN": "1"}]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the name of a module that starts ranks, and let the process that has started it end."""
    (tmp_path / "ranks_of_a_test.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    local_ranks._starter.cache_clear()
    yield "ranks_of_a_test"
    local_ranks._starter("ranks_of_a_test").end()
    local_ranks._starter.cache_clear()


def test_how_ranks_end(module: str) -> None:
    """One process starts the ranks of all jobs, one after the other."""
    jobs = {what: local_ranks.run(module, RANKS, what, 20.0) for what in ("be well", "raise", "signal")}
    assert {what: [end.status for end in ends] for what, ends in jobs.items()} == {
        "be well": [0, 0],
        "raise": [0, 1],
        "signal": [0, -9],
    }
    assert [end.found.get("end") for end in jobs["raise"]] == ["0", None]
    assert "rank 1 says raise" in jobs["raise"][1].output and "ValueError: no luck" in jobs["raise"][1].output
    assert len({end.found["pids"][1] for ends in jobs.values() for end in ends}) == 1


@pytest.mark.parametrize(("victims", "bound"), [([1], 20.0), ([], 0.5)])
def test_a_frozen_rank_is_killed_in_the_end(module: str, victims: list[int], bound: float) -> None:
    began = time.monotonic()
    first, frozen = local_ranks.run(module, RANKS, "freeze", bound, victims)
    assert time.monotonic() - began < 15
    assert (first.status, frozen.status) == (0, None)
    assert not Path(f"/proc/{frozen.found['pids'][0]}").exists()


def test_what_ranks_have_left_is_seen_while_they_run(module: str) -> None:
    seen: list[Any] = []
    local_ranks.run(module, RANKS, "wait", 20.0, look=lambda left: seen.append([sorted(each) for each in left]))
    assert [["pids"], ["pids"]] in seen


def test_a_module_that_cannot_start_says_why(tmp_path: Path) -> None:
    local_ranks._starter.cache_clear()
    ends = local_ranks.run("nowhere_at_all", RANKS, "be well", 20.0)
    assert all(end.status is None and "No module named nowhere_at_all" in end.output for end in ends)
    local_ranks._starter.cache_clear()


def is_there(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_the_end(pids: list[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(map(is_there, pids)):
        assert time.monotonic() < until, pids
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("ended", "number"), [("caller", signal.SIGTERM), ("caller", signal.SIGINT), ("starter", signal.SIGKILL)]
)
def test_ranks_do_not_outlive_whoever_asked_for_them(module: str, ended: str, number: signal.Signals) -> None:
    """Only one process gets the signal, not its group as from a terminal."""
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert caller.stdout
    try:
        pids = [int(word) for word in caller.stdout.readline().split()]
        assert all(map(is_there, pids)) and len(pids) == 3
        os.kill(caller.pid if ended == "caller" else pids[-1], number)
        wait_for_the_end([caller.pid, *pids], 4.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(caller.pid, signal.SIGKILL)
        caller.communicate()


def test_a_look_that_fails_ends_the_job(module: str) -> None:
    """As the line that is printed meanwhile, where nobody reads it: it is not taken for the end of the starter."""
    seen: list[int] = []

    def look(left: list[dict[str, Any]]) -> None:
        seen.extend(each["pids"][0] for each in left if "pids" in each)
        if len(seen) > 1:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        local_ranks.run(module, RANKS, "orphan", 20.0, look=look)
    wait_for_the_end(seen, 0.0)
    assert [end.status for end in local_ranks.run(module, RANKS, "be well", 20.0)] == [0, 0]


def test_many_open_files(module: str) -> None:
    """select() takes descriptors below 1024 only."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1200, limits[1]), limits[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        while (number := os.open(os.devnull, os.O_RDONLY)) < 1030:
            stack.callback(os.close, number)
        stack.callback(os.close, number)
        assert [end.status for end in local_ranks.run(module, RANKS, "be well", 20.0)] == [0, 0]
