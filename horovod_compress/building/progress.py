"""How far one command is, read from its output and from the clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

_CMAKE = re.compile(r"^\s*\[\s*(\d{1,3})%\]\s*(.*)")
_PIP = re.compile(r"^\s*Progress (\d+) of (\d+)")
_PATH = re.compile(r"\S*/(?=[^\s/]+)")

# Up to here the clock is believed; beyond, a phase that takes longer than expected only creeps.
_BELIEVED = 0.9


def parse_percent(line: str) -> int | None:
    """Reads the percentage of a whole build from CMake's `[ 45%] Building ...`."""
    match = _CMAKE.match(line)
    return min(int(match[1]), 100) if match else None


def parse_download(line: str) -> tuple[int, int] | None:
    """Reads the bytes that came and all bytes from pip's raw `Progress 12 of 34`; one file's, not a phase's."""
    match = _PIP.match(line)
    return (int(match[1]), int(match[2])) if match and int(match[2]) > 0 else None


def describe(line: str) -> str:
    """What a line of output says to a person, without counters and paths."""
    if download := parse_download(line):
        return f"{download[0] / 1e6:.0f} of {download[1] / 1e6:.0f} MB"
    if _PIP.match(line):
        return ""
    match = _CMAKE.match(line)
    words = (match[2] if match else line).strip()
    return words.rsplit("/", 1)[-1] if words.startswith("Building") else _PATH.sub("", words)


def clock_text(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class CommandProgress:
    """From 0 to 1, and never back: a build's own percentage, or the time passed of the time expected.

    A download goes by time: its percentage begins again with every file, and how many files come is unknown.
    """

    def __init__(self, expected_seconds: float, counts: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.activity = ""
        self._expected = expected_seconds
        self._counts = counts
        self._clock = clock
        self._started = clock()
        self._percent = 0
        self._download = (self._started, 0, 0)  # when it began, bytes then, all bytes
        self._fraction = 0.0

    def take(self, line: str) -> None:
        """Takes a line of the command's output."""
        if not line.strip():
            return
        percent = parse_percent(line)
        self._percent = max(self._percent, percent or 0)
        if download := parse_download(line):
            self._expect(*download)
        # Between the lines of a build that count there are its commands, which say little.
        if percent is not None or self._percent == 0:
            self.activity = describe(line) or self.activity

    def fraction(self) -> float:
        now = self._percent / 100 if self._counts else self._by_time()
        self._fraction = max(self._fraction, now)
        return self._fraction

    def _by_time(self) -> float:
        passed = (self._clock() - self._started) / self._expected
        return passed if passed <= _BELIEVED else 1 - _BELIEVED * (1 - _BELIEVED) / passed

    def _expect(self, received: int, size: int) -> None:
        """A slow network makes the phase longer than expected."""
        began, at_first, known_size = self._download
        if size != known_size or received < at_first:
            self._download = (self._clock(), received, size)
        elif received > at_first:
            seconds_left = (self._clock() - began) * (size - received) / (received - at_first)
            self._expected = max(self._expected, self._clock() - self._started + seconds_left)
