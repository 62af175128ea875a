"""Show how far a run is: a bar on a terminal, else a plain line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """The progress of one run; silent on every rank but the first.

    Args:
        total: steps of the run.
        shown: False on the ranks that keep silent.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self._total, self._done, self._shown = total, 0, shown
        self._printed = time.monotonic()
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="step")

    def step(self, loss: float) -> None:
        """Count a step; the loss is that of this rank's batch."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            self._bar.update()
        elif self._shown and time.monotonic() - self._printed > SECONDS_BETWEEN_LINES:
            self.say(f"step {self._done}/{self._total}  loss {loss:.3f}")

    def say(self, text: str) -> None:
        """Print a line without breaking the bar."""
        if not self._shown:
            return
        self._printed = time.monotonic()
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def evaluated(self, done: int, text: str) -> None:
        """Print the result of an evaluation."""
        self.say(f"step {done}/{self._total}  {text}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
