"""One line that says what runs, how far it is and for how long."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable
from typing import TextIO

_CMAKE = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s*(.*)")
_PIP = re.compile(r"^Progress (\d+) of (\d+)")

# How often the line changes: on a terminal for the eye, in a file so that a reader sees that it still lives.
_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 30.0
_PLAIN_PERCENT = 25


def parse_percent(line: str) -> int | None:
    """Reads the percentage from CMake's `[ 45%] Building ...` or pip's raw `Progress 12 of 34`."""
    if match := _CMAKE.match(line):
        return min(int(match[1]), 100)
    if (match := _PIP.match(line)) and int(match[2]) > 0:
        return min(100 * int(match[1]) // int(match[2]), 100)
    return None


def describe(line: str) -> str:
    """What a line of output says to a person, without counters and paths of objects."""
    if _PIP.match(line):
        return ""
    match = _CMAKE.match(line)
    words = (match[2] if match else line).strip()
    return words.rsplit("/", 1)[-1] if words.startswith("Building") else words


def clock_text(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Display:
    """Shows one step: a line rewritten in place on a terminal, a few plain lines anywhere else."""

    def __init__(self, title: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.title = title
        self.percent: int | None = None
        self._activity = ""
        self._stream = stream
        self._clock = clock
        self._started = self._last_shown = clock()
        self._last_percent = 0
        self._terminal = stream.isatty()
        if not self._terminal:
            self._write(f"{title} ...\n")

    def update(self, line: str = "") -> None:
        """Takes a line of the step's output; call it without one now and then to keep the clock going."""
        if line.strip():
            percent = parse_percent(line)
            self.percent = percent if percent is not None else self.percent
            self._activity = describe(line) or self._activity
        if self._is_due():
            self._last_shown = self._clock()
            self._last_percent = self.percent or 0
            self._show()

    def finish(self, outcome: str) -> None:
        elapsed = clock_text(self._clock() - self._started)
        self._write(f"{self._line_start()}{self.title}: {outcome} ({elapsed})\n")

    def _is_due(self) -> bool:
        waited = self._clock() - self._last_shown
        if self._terminal:
            return waited >= _TERMINAL_SECONDS
        # A percentage that falls belongs to the next of several downloads.
        moved = abs((self.percent or 0) - self._last_percent)
        return waited >= _PLAIN_SECONDS or (moved >= _PLAIN_PERCENT and waited >= 1.0)

    def _show(self) -> None:
        elapsed = clock_text(self._clock() - self._started)
        percent = f" {self.percent:3d}%" if self.percent is not None else ""
        if self._terminal:
            text = f"{self.title}:{percent}  {elapsed}  {self._activity}"
            self._write(self._line_start() + text[: shutil.get_terminal_size().columns - 1])
        else:
            self._write(f"{self.title}:{percent} after {elapsed}\n")

    def _line_start(self) -> str:
        # Carriage return, then "erase to the end of the line".
        return "\r\x1b[K" if self._terminal else ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
