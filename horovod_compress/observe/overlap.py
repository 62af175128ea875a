"""How much of the exchanges is hidden behind the backward pass."""

from __future__ import annotations

import time
from collections.abc import Iterable
from math import inf
from typing import NamedTuple

from .stats import Hidden


class StepOverlap(NamedTuple):
    """Seconds of one step, or of several.

    Attributes:
        busy: at least one bucket was between the beginning of its exchange and its result.
        hidden: the part of these before the last gradient of their step was offered.
    """

    busy: float
    hidden: float

    @property
    def share(self) -> float:
        """The share that is hidden, from 0 to 1; 0 where nothing was exchanged."""
        return self.hidden / self.busy if self.busy else 0.0


class Overlap:
    """Measures how much of the exchanges runs while gradients still arrive.

    A bucket is *busy* from when the exchange thread begins with it, all its gradients being there, until its result
    can be fetched: preludes, encoding, exchange with the waiting for slower ranks, decoding, and the comparison of
    results where one is due. Times in which several buckets are busy count once. What lies before the last gradient
    of the step was offered is *hidden*: the training thread was still in the backward pass. So a single bucket
    hides nothing, by definition, and the first of many buckets hides most. Skipped tensors are no gradients.

    It costs a look at the clock for each gradient, and two for each bucket.
    """

    def __init__(self) -> None:
        self._busy = self._hidden = 0.0
        self._last_offer: dict[int, float] = {}  # by step: the next one may begin before the last result
        self._spans: list[tuple[float, float]] = []

    def offered(self, step: int) -> None:
        """Mark that a gradient was offered, on the thread of the backward pass."""
        self._last_offer[step] = time.perf_counter()

    def delivered(self, began: float, ended: float) -> None:
        """Mark a bucket's exchange and result, in order, on the decoding thread."""
        self._spans.append((began, ended))

    def finish(self, step: int) -> StepOverlap:
        """Count the buckets since the last call as those of a step, and return its seconds."""
        end = self._last_offer.pop(step, -inf)
        found = StepOverlap(covered(self._spans), covered(self._spans, end))
        self._spans.clear()
        self._busy += found.busy
        self._hidden += found.hidden
        return found

    @property
    def exposed(self) -> float:
        """Seconds over all finished steps that the backward pass did not hide."""
        return self._busy - self._hidden

    def document(self) -> Hidden:
        """Return the share over all finished steps, and the seconds that it is made of."""
        total = StepOverlap(self._busy, self._hidden)
        return {"overlap": total.share, "overlap_seconds": {"busy": total.busy, "hidden": total.hidden}}


def covered(spans: Iterable[tuple[float, float]], until: float = inf) -> float:
    """Return how long at least one of the spans was on, before a time; they are in order of their ends."""
    seconds, done = 0.0, -inf
    for began, ended in spans:
        stop = min(ended, until)
        seconds += max(0.0, stop - max(began, done))
        done = max(done, stop)
    return seconds
