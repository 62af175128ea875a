"""The lab from outside: start it, set its links, run jobs on its hosts."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from ..horovodrun import JobFailed, reason
from ..outcomes import LinkBytes, Outcome, environment, log_file, records_in
from .needs import LabError, namespaces
from .network import MOST_HOSTS
from .rates import Rate, parse_delay

_START_SECONDS = 60.0
_ANSWER_SECONDS = 30.0
_END_SECONDS = 20.0

Document = dict[str, Any]


class Lab:
    """Hosts on this machine, joined by links of limited rate; a launcher of jobs.

    Args:
        ranks: of the jobs.
        rate: of every link, in both directions, such as ``1gbit``; None for no limit.
        delay: of every packet between two hosts, such as ``5ms``, so that a round trip takes twice
            as long; by netem, or by a process of the lab where the kernel has none.
        slots: ranks on a host.
        congestion: TCP's congestion control; None for Linux's default as far as it can be had.

    Raises:
        LabError: this machine or this user cannot have a lab; the text says what to do.
        ValueError: a number or a unit makes no sense.
    """

    def __init__(
        self,
        ranks: int,
        rate: str | None = None,
        delay: str | None = None,
        slots: int = 1,
        congestion: str | None = None,
    ) -> None:
        self.ranks, self.slots = ranks, slots
        hosts = -(-ranks // slots) if slots > 0 else 0
        if not 1 <= hosts <= MOST_HOSTS:
            raise ValueError(
                f"a lab has 1 to {MOST_HOSTS} hosts, with {ranks} ranks and {slots} on a host it would have {hosts}"
            )
        self._rate, self._delay = Rate.parse(rate) if rate else None, parse_delay(delay) if delay else 0.0
        self._congestion = congestion
        self._names = [f"lab{number}" for number in range(hosts)]
        self._events: queue.Queue[Document | None] = queue.Queue()
        self._facts: Document = {}
        self._errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        self._job = 0
        self._start()

    def _start(self) -> None:
        spec = json.dumps({"names": self._names, "congestion": self._congestion})
        self._process = subprocess.Popen(
            [*namespaces(), sys.executable, "-m", "benchmarks.lab.inside", spec],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | environment() | {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin"},
            start_new_session=True,  # a Ctrl-C comes to us alone, and we end the lab in order
        )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        try:
            self._facts |= self._await("ready", _START_SECONDS)
            self.limit(self._rate, self._delay)
        except BaseException:
            self.close()
            raise

    def _read(self, lines: IO[str]) -> None:
        try:
            with lines:
                for line in lines:
                    self._events.put(json.loads(line))
        finally:
            self._events.put(None)

    def _tell(self, **order: object) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise LabError(f"the lab has ended{self._why()}") from None

    def _await(self, event: str, seconds: float) -> Document:
        """Return the next event, which has to be this one."""
        try:
            found = self._events.get(timeout=max(0.0, seconds))
        except queue.Empty:
            raise LabError(f"the lab gave no answer within {seconds:.0f} s") from None
        if found is None:
            raise LabError(f"the lab has ended{self._why()}")
        if found["event"] == "error":
            raise LabError(found["text"])
        if found["event"] != event:
            raise LabError(f"the lab said {found['event']} where {event} was due; this is a bug")
        return found

    def _why(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    # ---- what it is ----

    def describe(self) -> Document:
        """Return the facts that belong beside every figure."""
        return {
            "launcher": "lab",
            "hosts": len(self._names),
            "ranks": self.ranks,
            "rate": self._rate.text if self._rate else None,
            "rate_bits": self._rate.bits if self._rate else None,
            "delay_seconds": self._delay,
            "delayed_by": self._facts.get("delayed_by"),
            "burst_bytes": self._facts.get("burst_bytes"),
            "queue_bytes": self._facts.get("queue_bytes"),
            "congestion_control": self._facts["congestion_control"],
        }

    def limit(self, rate: Rate | None, delay: float = 0.0) -> None:
        """Set the rate and the delay of all links."""
        self._tell(do="limit", rate=rate.text if rate else None, delay=delay)
        self._facts |= self._await("limited", _ANSWER_SECONDS)
        self._rate, self._delay = rate, delay

    # ---- jobs ----

    def run(
        self,
        name: str,
        arguments: list[str],
        limit: float,
        on_line: Callable[[str], None] | None = None,
        log: Path | None = None,
    ) -> Outcome:
        """Run Python with these arguments on every rank; see :class:`benchmarks.launch.Launcher`."""
        self._job += 1
        words = [sys.executable, *arguments]
        place = {"ranks": self.ranks, "slots": self.slots, "environment": environment()}
        self._tell(do="run", job=self._job, words=words, limit=limit, **place)
        lines: list[str] = []
        with log_file(log) as path:
            try:
                with path.open("w") as file:
                    done = self._follow(lines, file, on_line, limit)
            except BaseException:
                self._stop()
                raise
            return self._outcome(name, lines, done, limit, path)

    def _outcome(self, name: str, lines: list[str], done: Document, limit: float, path: Path) -> Outcome:
        if done["late"]:
            raise JobFailed(f"{name}: not done after {limit:.0f} s; log: {path}")
        if bad := {rank: status for rank, status in done["status"].items() if status}:
            said = ", ".join(f"rank {rank}: {status}" for rank, status in bad.items())
            raise JobFailed(f"{name}: {reason(lines)} (exit status of {said}); log: {path}")
        return Outcome(lines, records_in(lines), [LinkBytes(**link) for link in done["links"]])

    def _follow(self, lines: list[str], log: IO[str], on_line: Callable[[str], None] | None, limit: float) -> Document:
        end = time.monotonic() + limit + _END_SECONDS
        while True:
            try:
                event = self._events.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise LabError(f"the lab gave no answer {_END_SECONDS:.0f} s after the limit") from None
            if event is None:
                raise LabError(f"the lab has ended{self._why()}")
            if event["event"] == "error":
                raise LabError(event["text"])
            if event.get("job") != self._job:
                continue  # a late word of a job that nobody waited for
            if event["event"] == "done":
                return event
            log.write(f"[{event['rank']}] {event['text']}\n")
            log.flush()
            lines.append(event["text"])
            if on_line:
                on_line(event["text"])

    def _stop(self) -> None:
        """End a job that nobody waits for any more, and forget what it says; or the lab, if that takes too long."""
        end = time.monotonic() + _END_SECONDS
        try:
            self._tell(do="stop", job=self._job)
            while (event := self._events.get(timeout=max(0.0, end - time.monotonic()))) is not None:
                if event["event"] in ("done", "error"):
                    return
        except (LabError, queue.Empty):
            self.close()

    # ---- the end ----

    def close(self) -> None:
        """End the lab, with everything that runs in it."""
        if self._errors.closed:
            return
        with contextlib.suppress(BrokenPipeError, OSError):
            assert self._process.stdin
            self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # unshare takes the lab's first process along
            self._process.wait()
        self._reader.join(_END_SECONDS)
        self._errors.close()

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
