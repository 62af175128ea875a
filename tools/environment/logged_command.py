"""Runs one long command: its output goes to a log, one line of progress to the person who waits."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from environment.progress import Display

_TAIL_LINES = 25
_PATIENCE_SECONDS = 3.0
_LINE_END = re.compile(rb"[\r\n]+")
_CAUSE = re.compile(r"(fatal error|\berror\b|CMake Error|undefined reference|No space left|not find)", re.IGNORECASE)


class StepFailed(Exception):
    """A command of a step failed. The text ends with the three lines that matter."""

    def __init__(self, title: str, status: int, log: Path, lines: Sequence[str]) -> None:
        self.status = status
        tail = "\n".join(f"  | {line}" for line in list(lines)[-_TAIL_LINES:])
        super().__init__(
            f"{tail}\n\n"
            f"make setup failed at: {title} (exit status {status})\n"
            f"  first error:  {probable_cause(lines)}\n"
            f"  full log:     {log}"
        )


def probable_cause(lines: Sequence[str]) -> str:
    """The first line that looks like an error; the last line where none does."""
    return next((line.strip() for line in lines if _CAUSE.search(line)), lines[-1].strip() if lines else "no output")


class CommandRunner:
    """Runs commands with one log for all of them."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self._fresh = True

    def run(
        self,
        command: Sequence[str | Path],
        *,
        title: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
    ) -> None:
        """Runs a command to its end.

        Raises:
            StepFailed: It ended with another status than 0.
        """
        display = Display(title, sys.stdout)
        lines: deque[str] = deque(maxlen=5000)
        with self._open_log() as log:
            log.write(f"$ {shlex.join(map(str, command))}\n".encode())
            try:
                status = self._follow(command, environment, folder, log, display, lines)
            except BaseException:
                display.finish("interrupted")
                raise
        display.finish("done" if status == 0 else "FAILED")
        if status != 0:
            raise StepFailed(title, status, self.log, lines)

    def _open_log(self) -> IO[bytes]:
        """The log of one run of the tool: its first command empties what the run before left."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        mode = "wb" if self._fresh else "ab"
        self._fresh = False
        return self.log.open(mode)

    def _follow(
        self,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None,
        folder: Path | None,
        log: IO[bytes],
        display: Display,
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
                    if line:
                        lines.append(line)
                    display.update(line)
                return process.wait()
            except BaseException:
                _end_group(process)
                raise


def _lines(output: IO[bytes], log: IO[bytes]) -> Iterator[str]:
    """Lines as they come, and an empty one whenever half a second passed in silence."""
    descriptor = output.fileno()
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout=0.5):
                yield ""
                continue
            block = os.read(descriptor, 65536)
            if not block:
                break
            log.write(block)
            log.flush()
            *whole, rest = _LINE_END.split(rest + block)
            yield from (line.decode(errors="replace") for line in whole)
    if rest:
        yield rest.decode(errors="replace")


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
