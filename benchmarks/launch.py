"""Where a benchmark's ranks run: with `horovodrun` on hosts that exist, or in the network lab."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from jobs import Job, JobFailed, reason, run  # noqa: E402

__all__ = ["JobFailed", "Launcher", "LinkBytes", "Outcome", "environment", "open_launcher", "reason", "records_in"]

_MARK = "@record "


class LinkBytes(NamedTuple):
    """What one host's link carried during a job, as the kernel counts Ethernet frames."""

    host: str
    sent: int
    received: int
    packets_sent: int
    packets_received: int
    dropped: int


class Outcome(NamedTuple):
    """What a job left.

    Attributes:
        lines: everything the ranks printed.
        records: what rank 0 printed behind ``@record``, read as JSON.
        links: the bytes on each host's link; None where nobody counts them.
    """

    lines: list[str]
    records: list[dict[str, Any]]
    links: list[LinkBytes] | None


class Launcher(AbstractContextManager, Protocol):  # type: ignore[type-arg]
    """Starts jobs with a fixed number of ranks."""

    ranks: int

    def describe(self) -> dict[str, Any]:
        """Return what belongs beside every figure: launcher, hosts, ranks, rate, delay."""

    def run(
        self,
        name: str,
        arguments: list[str],
        limit: float,
        on_line: Callable[[str], None] | None = None,
        log: Path | None = None,
    ) -> Outcome:
        """Run Python with these arguments on every rank.

        Args:
            name: for messages.
            limit: seconds after which the job is ended.
            on_line: called with every line that a rank prints, without the rank.
            log: a file for the lines; by default a temporary one, which is kept when the job fails.

        Raises:
            JobFailed: a rank ended badly, or the limit was reached.
        """


def emit(record: dict[str, Any]) -> None:
    """Print a record, for the launcher to find; rank 0 only."""
    print(_MARK + json.dumps(record), flush=True)


def records_in(lines: list[str]) -> list[dict[str, Any]]:
    """Return the records among a job's lines."""
    return [json.loads(line[len(_MARK) :]) for line in lines if line.startswith(_MARK)]


def environment() -> dict[str, str]:
    """Return what every rank's environment needs: one thread a rank, and this folder to import from."""
    path = os.environ.get("PYTHONPATH")
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{path}" if path else str(ROOT)}


@contextlib.contextmanager
def log_file(wanted: Path | None) -> Iterator[Path]:
    """Give a place for a job's log: the one that is wanted, or a temporary one that goes unless the job fails."""
    if wanted:
        wanted.parent.mkdir(parents=True, exist_ok=True)
        yield wanted
        return
    folder = Path(tempfile.mkdtemp(prefix="horovod-compress-"))
    yield folder / "job.log"
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _PythonJob(Job):
    """One horovodrun of Python with arguments."""

    hosts: str | None = None  # as horovodrun takes them

    def command(self) -> list[str]:
        horovodrun = Path(sys.executable).with_name("horovodrun")
        place = ["-H", self.hosts] if self.hosts else []
        start = [sys.executable, str(horovodrun), "-np", str(self.ranks), *place]
        return [*start, sys.executable, *self.arguments]


class Here:
    """Starts jobs with `horovodrun`, on this machine or on hosts that ssh reaches.

    Args:
        hosts: as horovodrun takes them, such as ``a:1,b:1``; this machine by default.
    """

    def __init__(self, ranks: int, hosts: str | None = None) -> None:
        self.ranks, self._hosts = ranks, hosts

    def describe(self) -> dict[str, Any]:
        hosts = len(self._hosts.split(",")) if self._hosts else 1
        return {"launcher": "horovodrun", "hosts": hosts, "ranks": self.ranks, "rate": None, "rate_bits": None}

    def run(
        self,
        name: str,
        arguments: list[str],
        limit: float,
        on_line: Callable[[str], None] | None = None,
        log: Path | None = None,
    ) -> Outcome:
        lines: list[str] = []

        def take(line: str) -> None:
            lines.append(line)
            if on_line:
                on_line(line)

        with log_file(log) as path:
            run(_PythonJob(name, self.ranks, arguments, path, limit, environment(), self._hosts), take)
        return Outcome(lines, records_in(lines), None)

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


def open_launcher(
    where: str, ranks: int, rate: str | None = None, delay: str | None = None, hosts: str | None = None
) -> Launcher:
    """Return a launcher, to be used in a ``with`` statement.

    Args:
        where: "lab" for hosts on this machine with limited links, "here" for horovodrun.
        rate: of the lab's links, such as ``1gbit``; None or "none" for no limit.
        delay: of the lab's links, such as ``5ms``.
        hosts: for horovodrun.

    Raises:
        ValueError: the two do not go together, or a value makes no sense.
        LabError: this machine cannot have a lab.
    """
    if where == "lab":
        from .lab import Lab

        if hosts:
            raise ValueError("the lab makes its own hosts; leave --hosts out, or run --where here")
        return Lab(ranks, None if rate == "none" else rate, delay)
    if where != "here":
        raise ValueError(f'where should be "lab" or "here", got {where!r}')
    if rate not in (None, "none") or delay:
        raise ValueError("only the lab can limit or delay links: run --where lab, or leave the rate and delay out")
    return Here(ranks, hosts)
