"""Where a benchmark's ranks run: with `horovodrun` on hosts that exist, or in the network lab."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.horovodrun import Job, JobFailed, run
from benchmarks.lab import Lab
from benchmarks.outcomes import Outcome, environment, log_file, records_in

__all__ = ["JobFailed", "Launcher", "Outcome", "open_launcher"]


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
        if hosts:
            raise ValueError("the lab makes its own hosts; leave --hosts out, or run --where here")
        return Lab(ranks, None if rate == "none" else rate, delay)
    if where != "here":
        raise ValueError(f'where should be "lab" or "here", got {where!r}')
    if rate not in (None, "none") or delay:
        raise ValueError("only the lab can limit or delay links: run --where lab, or leave the rate and delay out")
    return Here(ranks, hosts)
