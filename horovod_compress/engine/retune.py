"""Notices that the network is no longer what it was when buckets were chosen."""

from __future__ import annotations

from collections.abc import Sequence

from ..observe.metrics import Metrics

#: Steps between two looks; each costs one small gather.
EVERY = 100
#: A change by this factor, up or down, counts.
RATIO = 1.5
#: This many checks in a row have to show it.
LOOKS = 2


class RetuneTrigger:
    """Compares the time of exchanges with what it was at first.

    Args:
        step: the first step of the buckets in use.
    """

    def __init__(self, metrics: Metrics, step: int) -> None:
        self._metrics = metrics
        self._step, self._seconds = step, metrics.seconds["exchange"]
        self._seen = 0
        #: Seconds of exchange in a step, at first and at the last look.
        self.first: float | None = None
        self.last = 0.0

    def due(self, step: int) -> bool:
        """Return whether it is time to look; the same on every rank."""
        return step - self._step >= EVERY

    def seconds(self, step: int) -> float:
        """Return this rank's seconds of exchange in a step, since the last look."""
        steps, self._step = step - self._step, step
        spent, self._seconds = self._metrics.seconds["exchange"] - self._seconds, self._metrics.seconds["exchange"]
        return spent / steps

    def look(self, of_ranks: Sequence[float]) -> bool:
        """Take in every rank's seconds, and return whether things have changed; the same on every rank."""
        self.last = min(of_ranks)  # of the rank that did not wait
        if self.first is None:
            self.first = self.last
        changed = not self.first / RATIO <= self.last <= self.first * RATIO
        self._seen = self._seen + 1 if changed else 0
        return self._seen >= LOOKS
