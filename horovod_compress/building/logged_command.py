"""Runs long commands: their output goes to a log of each phase, how far they are to the bar."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from .advice import advice, excerpt
from .bar import Bar

_KEPT_LINES = 5000
_PATIENCE_SECONDS = 3.0
_LINE_END = re.compile(rb"[\r\n]+")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")


class StepFailed(Exception):
    """A command failed. The text is what a person needs: the first error, what to do, the log."""

    def __init__(self, title: str, status: int, log: Path, lines: Sequence[str], program: str = "make setup") -> None:
        self.status = status
        shown = "\n".join(f"  | {line.rstrip()}" for line in excerpt(lines)) or "  | (it printed nothing)"
        super().__init__(
            f"{program} failed while {title} ({_ending(status)}). The first error and the last "
            f"lines:\n\n{shown}\n\n{advice(lines, status)}\nThen run {program} again: it continues where it "
            f"stopped.\nFull log: {log}"
        )


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class Stopped(Exception):
    """Something else failed or was interrupted, so this was ended as well."""


class CommandRunner:
    """Runs commands, each as one phase of the bar with a log named after it; in several threads, if need be."""

    def __init__(self, logs: Path, bar: Bar, program: str = "make setup") -> None:
        self.logs = logs
        self.program = program
        self.bar = bar
        self._written: set[str] = set()
        self._stopping = threading.Event()

    def run(
        self,
        command: Sequence[str | Path],
        *,
        phase: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Runs a command to its end.

        Raises:
            StepFailed: It ended with another status than 0.
            Stopped: `stop` was called meanwhile.
        """
        self.check()
        lines: deque[str] = deque(maxlen=_KEPT_LINES)
        with self.bar.phase(phase) as show, self._open_log(phase) as log:
            log.write(f"$ {shlex.join(map(str, command))}\n".encode())
            status = self._follow(command, environment, folder, log, show, lines)
        if status != 0:
            raise StepFailed(self.bar.title(phase), status, self.log(phase), list(lines), self.program)
        self.bar.done(phase)

    def log(self, phase: str) -> Path:
        return self.logs / f"{phase}.log"

    def stop(self) -> None:
        """Ends what runs in other threads: each ends its own command, and raises Stopped."""
        self._stopping.set()

    def check(self) -> None:
        """Raises Stopped after `stop`."""
        if self._stopping.is_set():
            raise Stopped

    def pause(self) -> None:
        """Waits for a moment, between two looks at what another thread or process does."""
        self._stopping.wait(0.1)
        self.check()

    def _open_log(self, phase: str) -> IO[bytes]:
        """The log of one run of the tool: the phase's first command empties what the run before left."""
        self.logs.mkdir(parents=True, exist_ok=True)
        mode = "ab" if phase in self._written else "wb"
        self._written.add(phase)
        return self.log(phase).open(mode)

    def _follow(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None,
        folder: Path | None,
        log: IO[bytes],
        show: Callable[[str], None],
        lines: deque[str],
    ) -> int:
        # A process group of its own: an interrupt must end compilers, not only the pip that started them.
        with subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
            start_new_session=True,
            close_fds=False,  # locks are inherited, and nothing else is
        ) as process:
            assert process.stdout is not None
            try:
                for line in _lines(process.stdout, log):
                    self.check()
                    if line:
                        lines.append(line)
                    show(line)
                return process.wait()
            except BaseException:
                _end_group(process)
                raise


def _lines(output: IO[bytes], log: IO[bytes]) -> Iterator[str]:
    """Lines as they come, and an empty one whenever a moment passed in silence."""
    descriptor = output.fileno()
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout=0.2):
                yield ""
                continue
            block = os.read(descriptor, 65536)
            if not block:
                break
            log.write(block)
            log.flush()
            *whole, rest = _LINE_END.split(rest + block)
            yield from map(_text, whole)
    if rest:
        yield _text(rest)


def _text(line: bytes) -> str:
    return _COLOUR.sub("", line.decode(errors="replace"))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends the command and everything that it started, the polite way first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not _signal_group(process, number):
            return
        patience = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < patience:
            process.poll()  # collects it, so that an empty group can be told from a dead leader
            if not _signal_group(process, 0):
                return
            time.sleep(0.02)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether the group still existed; signal 0 only asks."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True
