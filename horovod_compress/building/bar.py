"""One progress bar over the whole set-up: it never goes back, and says what is under way."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from .progress import CommandProgress, clock_text

# How often it changes: on a terminal for the eye, in a file so that a reader sees that it still lives.
_TERMINAL_SECONDS = 0.2
_PLAIN_SECONDS = 30.0
_PLAIN_PERCENT = 10
_CELLS = 16


@dataclass(frozen=True)
class Phase:
    """One part of the set-up.

    Args:
        title: what a person reads, such as "building Horovod".
        seconds: how long it takes on two cores; its share of the bar.
        counts: its command prints a percentage of the whole; otherwise the clock says how far it is.
    """

    name: str
    title: str
    seconds: float
    counts: bool = False


class Bar:
    """A line rewritten in place on a terminal, a few plain lines anywhere else; nothing where nothing is done.

    Phases may run side by side, in threads.
    """

    def __init__(self, phases: Sequence[Phase], stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._phases = {phase.name: phase for phase in phases}
        self._fractions = dict.fromkeys(self._phases, 0.0)
        self._under_way: dict[str, CommandProgress] = {}
        self._stream = stream
        self._clock = clock
        self._started = self._shown_at = clock()
        self._percent = self._shown_percent = 0
        self._lock = threading.RLock()
        self._terminal = stream.isatty()
        self.used = False

    def title(self, name: str) -> str:
        return self._phases[name].title

    @contextmanager
    def phase(self, name: str) -> Iterator[Callable[[str], None]]:
        """Shows a phase as under way; the function takes the lines of its command, or "" to keep the clock going."""
        with self._lock:
            phase = self._phases[name]
            progress = self._under_way[name] = CommandProgress(phase.seconds, phase.counts, self._clock)
            self.used = True
            self._show()
        try:
            yield lambda line: self._take(progress, line)
        finally:
            with self._lock:
                self._fractions[name] = max(self._fractions[name], progress.fraction())
                del self._under_way[name]

    def done(self, *names: str) -> None:
        """These are complete, whether they were done now or found done."""
        with self._lock:
            self._fractions.update({name: 1.0 for name in names if name in self._fractions})

    def percent(self) -> int:
        """Of all phases; 100 is left to `finish`."""
        with self._lock:
            fractions = self._fractions | {
                name: max(self._fractions[name], progress.fraction()) for name, progress in self._under_way.items()
            }
            whole = sum(phase.seconds for phase in self._phases.values())
            passed = sum(phase.seconds * fractions[name] for name, phase in self._phases.items())
            self._percent = max(self._percent, min(99, int(100 * passed / whole)))
            return self._percent

    def say(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            self._write(f"{self._line_start()}{text}\n")

    def finish(self, text: str) -> None:
        """The last line: 100 %, where anything was done at all."""
        with self._lock:
            if self.used:
                self._percent = 100
                self._write(f"{self._line_start()}{self._line(text)}\n")

    def abandon(self) -> None:
        """Leaves the line as it is, for what is said of a failure or an interruption."""
        with self._lock:
            if self.used and self._terminal:
                self._write("\n")

    def _take(self, progress: CommandProgress, line: str) -> None:
        with self._lock:
            progress.take(line)
            if self._is_due():
                self._show()

    def _is_due(self) -> bool:
        waited = self._clock() - self._shown_at
        if self._terminal:
            return waited >= _TERMINAL_SECONDS
        return waited >= _PLAIN_SECONDS or (waited >= 1 and self.percent() - self._shown_percent >= _PLAIN_PERCENT)

    def _show(self) -> None:
        self._shown_percent, self._shown_at = self.percent(), self._clock()
        if self._terminal:
            self._write(self._line_start() + self._line(self._what(details=True)))
        else:
            self._write(f"{self._line(self._what(details=False))}\n")

    def _what(self, details: bool) -> str:
        """What is under way; every phase gets its share of the line."""
        names = [name for name in self._phases if name in self._under_way]
        entries = [(self.title(name), self._under_way[name].activity) for name in names]
        if not details:
            return ", ".join(title for title, _ in entries)
        room = (shutil.get_terminal_size().columns - len(self._line("")) - 1) // max(len(entries), 1) - 2
        shown = (f"{title}: {activity}" if activity else title for title, activity in entries)
        return ", ".join(entry[: max(room, 0)] for entry in shown)

    def _line(self, text: str) -> str:
        filled = _CELLS * self._percent // 100
        cells = f"[{'#' * filled}{'-' * (_CELLS - filled)}] " if self._terminal else ""
        line = f"{self._percent:3d} % {cells}{clock_text(self._clock() - self._started):>5}  {text}"
        return line[: shutil.get_terminal_size().columns - 1] if self._terminal else line

    def _line_start(self) -> str:
        # Carriage return, then "erase to the end of the line".
        return "\r\x1b[K" if self._terminal else ""

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
