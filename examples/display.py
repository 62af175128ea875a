"""What the demo shows while it runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import shutil
import sys
import time
from typing import Any

STEP = re.compile(r"^step (\d+)/\d+")


class Display:
    """The progress of several runs, told from the lines they print.

    Args:
        total: steps of all runs together.
    """

    SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, total: int) -> None:
        self._total, self._finished, self._current, self._name = total, 0, 0, ""
        self._printed = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            layout = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps, {elapsed}"
            # A terminal that does not tell its width would get no bar at all.
            self._bar = tqdm(total=total, bar_format=layout, ncols=shutil.get_terminal_size().columns)

    def start(self, name: str) -> None:
        self._name, self._current = name, 0
        if self._bar is not None:
            self._bar.set_description(f"{name:20}")

    def line(self, text: str) -> None:
        """Take one line of a run's output."""
        if found := STEP.match(text):
            self._advance(int(found[1]))

    def _advance(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(step - self._current)
        elif step and time.monotonic() - self._printed > self.SECONDS_BETWEEN_LINES:
            share = (self._finished + step) / self._total
            self.say(f"  {share:4.0%}  {self._name}: step {step}")
        self._current = step

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
