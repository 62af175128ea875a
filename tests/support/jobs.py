"""Real jobs with a hard bound: whatever happens, no process of a job outlives its test."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .nursery import MARK, ROOT, Nursery, settings
from .yields import sleeping_yields

JOBS = ROOT / "tests" / "parallel" / "jobs"
#: The environment of a process that is in no job, and has no option; bytecode stays where it is.
ALONE = {"PYTHONPATH": str(ROOT), "PATH": str(Path(sys.executable).parent)}
ALONE |= {name: os.environ[name] for name in ("PYTHONPYCACHEPREFIX",) if name in os.environ}

_PATIENCE = 10.0  # seconds for the other ranks when one has failed
_OUTPUT_LINES = 60
_RANK = re.compile(r"^\[\d+\](<\w+>:)?")  # of a fork, and of horovodrun


@dataclass(frozen=True)
class Job:
    """How a job ended.

    Attributes:
        reports: what each rank reported, None for a rank that reported nothing.
        status: the exit status of the launcher, None if the bound of time had to end it.
        output: all that was printed.
        pids: of the ranks that called :func:`.rank.say_pid`.
    """

    reports: list[Any]
    status: int | None
    output: str
    seconds: float
    pids: dict[int, int] = field(default_factory=dict)

    def values(self) -> list[dict[str, Any]]:
        """Return what every rank's cases came to, by name; a case that failed fails the test with its traceback."""
        for report in self.reports:
            errors = {name: case["traceback"] for name, case in report.items() if case["error"]}
            assert not errors, f"{errors}\n{self.tail()}"
        return [{name: case["value"] for name, case in report.items()} for report in self.reports]

    def lines(self) -> list[str]:
        """Return what ranks printed, without the rank that is told in front of each line, in whichever form."""
        return [_RANK.sub("", line) for line in self.output.splitlines()]

    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-_OUTPUT_LINES:])


@dataclass
class RunningJob:
    """A job under way, for tests that stop or kill a rank."""

    world: int
    folder: Path
    process: subprocess.Popen[bytes]
    mark: str

    def pid(self, rank: int, timeout: float = 30.0) -> int:
        """Wait until a rank has said its process id, see :func:`.rank.say_pid`."""
        return int(wait_for_file(self.folder / f"pid.{rank}", timeout, self.process))

    def wait_mark(self, name: str, rank: int, timeout: float = 30.0) -> str:
        """Wait until a rank has called ``mark(name)`` and return the text it left."""
        return wait_for_file(self.folder / f"mark.{name}.{rank}", timeout, self.process)


def wait_for_file(path: Path, timeout: float, process: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if path.exists():
            return path.read_text()
        if process.poll() is not None:
            break
        time.sleep(0.005)
    raise AssertionError(f"{path.name} did not come (job status {process.poll()})")


def needs_front(front: str) -> None:
    """Skip a test whose front is not installed: Horovod's; torch's always is."""
    if front == "horovod":
        import pytest

        pytest.importorskip("horovod.torch", reason="needs Horovod")


def run_ranks(
    world: int,
    script: str | Path,
    *,
    timeout: float = 60.0,
    arguments: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    during: Callable[[RunningJob], None] | None = None,
    must_succeed: bool = True,
    front: str = "horovod",
    launched: bool = False,
) -> Job:
    """Run a script on ``world`` ranks and return every rank's report.

    Args:
        front: "torch" starts the ranks as torch.distributed wants them.
        script: a file; a bare name is looked for in ``tests/parallel/jobs``.
        timeout: seconds of wall clock; afterwards every process of the job is killed.
        arguments: plain data, for :func:`tests.support.rank.arguments`.
        env: added to the environment of every rank.
        during: called while the job runs, to watch it or to harm it.
        must_succeed: raise AssertionError, with the output, unless the job ended by itself with
            status 0 and every rank has reported.
        launched: start the ranks with ``horovodrun -np world``, or ``tests.support.launch``, instead of forking
            them from a process that has imported everything; so are those of a job with ``during``, and of all jobs
            where there is a GPU, which no fork of a process can use that has looked for one, as torch's optimizers do.
    """
    path = JOBS / script
    if launched or during or torch.cuda.is_available():
        job = _launch(world, path, timeout, arguments, env, during, front)
    else:
        job = _fork(world, path, timeout, arguments, env, front)
    if must_succeed:
        assert job.status == 0, f"{path.name}: status {job.status} after {job.seconds:.1f} s\n{job.tail()}"
        silent = [rank for rank, report in enumerate(job.reports) if report is None]
        assert not silent, f"{path.name}: no report from ranks {silent}\n{job.tail()}"
    return job


def checks_of(script: str, later: Collection[str], world: int = 2, **options: Any) -> Callable[[str], list[Any]]:
    """Return what looks up every rank's value of one check of a job, which takes place when it is first asked.

    Args:
        later: checks that `make test` does without: they are done by a second job, when a test asks for one of them.
        options: of :func:`run_ranks`.
    """

    @cache
    def job(part: bool) -> Job | BaseException:
        try:
            return run_ranks(world, script, arguments={"in two": (sorted(later), part)}, **options)
        except BaseException as error:  # for all who ask: a job that hangs would hang once for each of them
            return error

    def values(name: str) -> list[Any]:
        done = job(name in later)
        if isinstance(done, BaseException):
            raise done
        return values_of(done.reports, name)

    return values


def values_of(reports: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    """Return every rank's value of one check of a job; one that failed fails the test with its traceback."""
    errors = [report[name].get("traceback") for report in reports]
    assert not any(errors), next(filter(None, errors))
    return [report[name]["value"] for report in reports]


def _fork(
    world: int,
    path: Path,
    timeout: float,
    arguments: Mapping[str, Any] | None,
    env: Mapping[str, str] | None,
    front: str,
) -> Job:
    began = time.monotonic()
    ranks = _nursery().run(world, path, arguments or {}, bound=timeout, patience=_PATIENCE, env=env, fronts=[front])
    statuses = [rank.status for rank in ranks]
    return Job(
        reports=[rank.report for rank in ranks],
        status=None if None in statuses else max(abs(status) for status in statuses),
        output="".join(f"[{rank.number}]{line}" for rank in ranks for line in rank.output.splitlines(keepends=True)),
        seconds=time.monotonic() - began,
        pids={rank.number: rank.pid for rank in ranks},
    )


@cache
def _nursery() -> Nursery:
    made = Nursery(JOBS)
    atexit.register(made.close)
    return made


def _launch(
    world: int,
    path: Path,
    timeout: float,
    arguments: Mapping[str, Any] | None,
    env: Mapping[str, str] | None,
    during: Callable[[RunningJob], None] | None,
    front: str,
) -> Job:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hvc-job-") as name:
        folder, mark = Path(name), uuid.uuid4().hex
        environment = _environment(world, folder, mark, arguments, env)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [*launcher(front), str(world), sys.executable, str(path)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
            status: int | None = None
            try:
                if during:
                    during(RunningJob(world, folder, process, mark))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    status = process.wait(max(0.1, timeout - (time.monotonic() - began)))
            finally:
                kill_marked(mark)
                process.wait(10)
        return Job(
            reports=[_read_json(folder / f"report.{rank}") for rank in range(world)],
            status=status,
            output=(folder / "output").read_text(errors="replace"),
            seconds=time.monotonic() - began,
            pids={rank: int((folder / f"pid.{rank}").read_text()) for rank in _with_pid(folder, world)},
        )


def _environment(
    world: int, folder: Path, mark: str, arguments: Mapping[str, Any] | None, env: Mapping[str, str] | None
) -> dict[str, str]:
    ours = {MARK: mark, "HVC_TEST_FOLDER": str(folder), "HVC_TEST_ARGUMENTS": json.dumps(dict(arguments or {}))}
    return os.environ | settings() | ours | sleeping_yields(world) | dict(env or {})


def launcher(front: str) -> list[str]:
    """Return the command that starts ranks, as far as to their number."""
    if front == "torch":
        return [sys.executable, "-m", "tests.support.launch"]
    return [sys.executable, str(_horovodrun()), "--gloo", "-np"]


def _horovodrun() -> Path:
    # Not resolve(): the python of a virtual environment is a link out of it.
    return Path(sys.executable).with_name("horovodrun")


def _with_pid(folder: Path, world: int) -> list[int]:
    return [rank for rank in range(world) if (folder / f"pid.{rank}").exists()]


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def kill_marked(mark: str) -> None:
    """Kill every process of a job until there is none."""
    import marked_processes  # of the tools, which only pytest has on its path: ranks import this module too

    marked_processes.kill_marked(MARK, mark)
