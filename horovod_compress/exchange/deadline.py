"""One bound for a whole operation, handed down to every wait in it."""

from __future__ import annotations

import time


class Deadline:
    """A point on the monotonic clock; each wait uses what is left of it."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Return the seconds that remain, never less than zero."""
        return max(0.0, self._end - time.monotonic())

    def passed(self) -> bool:
        return self.left() == 0.0
