"""Runs examples/train.py, or other jobs, under horovodrun within a time limit, leaving no process behind."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil

from horovod_compress.cli.common import ended_in_order

TRAIN = Path(__file__).resolve().parent.parent / "examples" / "train.py"
PREFIX = re.compile(r"^\[\d+\]<(?:stdout|stderr)>:")  # horovodrun's mark of rank and stream
ERROR = re.compile(r"^(train\.py: .+|[\w.]*(?:Error|Exception|Interrupt)\b.*)")
GRACE_SECONDS = 8.0  # horovodrun gives its workers five seconds before it kills them


class JobFailed(RuntimeError):
    """A job ended badly; the text says why and where its log is."""


@dataclass(frozen=True)
class Job:
    """One horovodrun of train.py."""

    name: str
    ranks: int
    arguments: list[str]
    log: Path
    limit: float  # seconds of wall clock
    environment: dict[str, str] = field(default_factory=dict)  # added to this process's own

    def command(self) -> list[str]:
        # Not resolve(): the python of a virtual environment is a link out of it.
        horovodrun = Path(sys.executable).with_name("horovodrun")
        train = [sys.executable, str(TRAIN), *self.arguments]
        return [sys.executable, str(horovodrun), "-np", str(self.ranks), *train]


def run(job: Job, on_line: Callable[[str], None]) -> None:
    """Run a job to its end, passing each line without horovodrun's prefix.

    Raises:
        JobFailed: it exceeded its limit or exited with an error.
    """
    job.log.parent.mkdir(parents=True, exist_ok=True)
    with job.log.open("w") as log, ended_in_order():
        process = subprocess.Popen(
            job.command(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | job.environment,
            start_new_session=True,  # a Ctrl-C comes to us alone, and we end the job in order
        )
        try:
            lines = list(_follow(process, job, log, on_line))
            status = process.wait()
        finally:
            stop_tree(process)
    if status:
        raise JobFailed(f"{job.name}: {reason(lines)} (exit status {status}); log: {job.log}")


def _follow(process: subprocess.Popen[str], job: Job, log: TextIO, on_line: Callable[[str], None]) -> Iterator[str]:
    """Yield the lines of a process until it closes its output or its time is up."""
    lines = _lines_of(process)
    deadline = time.monotonic() + job.limit
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise JobFailed(f"{job.name}: not done after {job.limit:.0f} s; log: {job.log}") from None
        if line is None:
            return
        log.write(line)
        log.flush()
        plain = PREFIX.sub("", line).rstrip()
        on_line(plain)
        yield plain


def _lines_of(process: subprocess.Popen[str]) -> queue.Queue[str | None]:
    """Return a queue of a process's lines, closed by None: a pipe alone has no timeout."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def reason(lines: list[str]) -> str:
    """Return the line that best says why a job failed.

    horovodrun adds its own traceback after the first failure of a rank, so the first
    error in the output is the cause and the later ones are consequences.
    """
    for line in lines:
        if found := ERROR.match(line):
            return found[1]
    return next((line for line in reversed(lines) if line), "no output")


def stop_tree(process: subprocess.Popen[str]) -> None:
    """End a process and all its descendants, first politely, then for good.

    A process group is not enough: horovodrun puts every worker in a session of its own.
    """
    try:
        tree = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        tree = []
    if process.poll() is None:
        process.terminate()
    _, alive = psutil.wait_procs(tree, timeout=GRACE_SECONDS if tree else 0)
    for survivor in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            survivor.kill()
    if process.poll() is None:
        process.kill()
    process.wait()
