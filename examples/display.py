"""What the demo shows while it runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import shutil
import sys
import time
from typing import Any

STEP = re.compile(r"^step (\d+)/\d+")


class Display:
    """The progress of several runs, read from the lines they print; it never goes back.

    Args:
        total: steps of all runs together.
    """

    SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, total: int) -> None:
        self._total, self._finished, self._current, self._name = total, 0, 0, ""
        self._start = self._share = 0.0  # where the bar stood when these runs began; where it stands
        self._printed = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            layout = "{l_bar}{bar}| {elapsed}"
            # A terminal that does not tell its width would get no bar at all.
            self._bar = tqdm(total=1.0, bar_format=layout, ncols=shutil.get_terminal_size().columns)

    @property
    def share(self) -> float:
        """How much is done, from 0 to 1."""
        return self._share

    def begin_again(self) -> None:
        """Expect all runs once more, in what is left of the bar."""
        self._start, self._finished, self._current = self._share, 0, 0

    def start(self, name: str) -> None:
        self._name, self._current = name, 0
        self._describe(f"{name}: starting")

    def line(self, text: str) -> None:
        """Take one line of a run's output."""
        if found := STEP.match(text):
            self._describe(f"{self._name}: training")
            self._advance(int(found[1]))
            if self._bar is None and self._current and time.monotonic() - self._printed > self.SECONDS_BETWEEN_LINES:
                self.say(f"  {self._share:4.0%}  {self._name}: step {self._current}")

    def _describe(self, text: str) -> None:
        if self._bar is not None:
            self._bar.set_description(f"{text:22}")

    def _advance(self, step: int) -> None:
        self._current = max(step, self._current)
        done = (self._finished + self._current) / self._total
        share = min(1.0, self._start + (1.0 - self._start) * done)
        if self._bar is not None:
            self._bar.update(share - self._share)
        self._share = share

    def done(self, steps: int, text: str) -> None:
        self._advance(steps)
        self._finished += steps
        self._current = 0
        self.say(text)

    def say(self, text: str) -> None:
        self._printed = time.monotonic()
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
