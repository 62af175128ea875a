"""What compression is worth in this job: the ratio now and later, and the seconds that a step takes less with it.

Some rounds of a job are exact. They send gradients uncompressed over the same network as the compressed ones, so the
two kinds of step can be compared where the job runs:

    t, b    seconds that training waits in a step, coding included, and bytes that the step sends, of each kind
    t of a float32 step = t_compressed + (t_exact - t_compressed) (b_float32 - b_compressed) / (b_exact - b_compressed)

Exact rounds often send bfloat16, half of what float32 takes, and the first ones 8 bits; hence the straight line through
the two kinds, which is longer from shorter rounds: the longest count, once there are enough. What waits for a slower
rank is in t as well. It varies most, and so the lower quartile of the steps stands for each kind. Of exact steps there
are few: whether they wait longer, and not by chance, is told by the order of all these times (the test of Mann and
Whitney, 1947), which no single slow step sways.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import itemgetter
from statistics import mean, median

from .metrics import Metrics, Overlap

#: The first steps open connections and fill caches: they are not looked at.
FIRST = 3
#: How many steps of each kind it takes to compare them, and how many of the last ones are kept.
LEAST, KEPT = 3, 200
#: Exact steps show nothing if they send less than this part of float32: coding weighs as much in them as bytes do, and
#: what they take would be extrapolated to four times as many.
SHOWS = 1 / 3
#: Numbers of two types differ by more than this part in length, and steps of one by less.
ALIKE = 0.75
#: A saving below this part of a step is none.
SMALL = 0.03
#: Standard deviations by which exact steps must stand above compressed ones. Chance does so in two of a hundred jobs if
#: steps are independent; in more of them if all exact steps come first.
CLEAR = 2.0
#: So many steps ahead are looked at one by one; after these, exact rounds come at the same distances.
AHEAD = 10_000


@dataclass(frozen=True)
class StepTimes:
    """Steps of one kind: seconds of a step, those that training waits in each of them, and bytes sent."""

    seconds: float
    all_waits: tuple[float, ...]
    sent: float

    @property
    def waits(self) -> float:
        """Seconds that training waits where nothing is slow, the lower quartile."""
        return sorted(self.all_waits)[len(self.all_waits) // 4]

    def clearly_above(self, other: StepTimes) -> bool:
        """Return whether training waits longer in these steps, and not by chance: the test of Mann and Whitney."""
        mine, theirs = self.all_waits, other.all_waits
        above = sum((one > two) + 0.5 * (one == two) for one in mine for two in theirs)
        pairs = len(mine) * len(theirs)
        return above - pairs / 2 > CLEAR * (pairs * (len(mine) + len(theirs) + 1) / 12) ** 0.5


class Pace:
    """How long training waits in a step, exact and compressed ones apart. It costs a look at the clock for each step.

    Args:
        overlap: knows what the backward pass hides.
    """

    def __init__(self, metrics: Metrics, overlap: Overlap) -> None:
        self._metrics, self._overlap = metrics, overlap
        self._steps: dict[bool, deque[tuple[float, float, int]]] = {kind: deque(maxlen=KEPT) for kind in (True, False)}
        self._last: tuple[float, float, int, int, int] | None = None

    def begin_step(self) -> None:
        """Begin a step, which ends the one before."""
        metrics, last = self._metrics, self._last
        waited = self._overlap.exposed + metrics.seconds["offer"]
        now = self._last = time.perf_counter(), waited, metrics.steps, metrics.bytes_exact, metrics.bytes_compressed
        if last is None or now[2] != last[2] + 1 or now[2] <= FIRST:
            return
        exact, compressed = now[3] - last[3], now[4] - last[4]
        if exact or compressed:
            self._steps[not compressed].append((now[0] - last[0], now[1] - last[1], exact + compressed))

    def sent(self) -> dict[bool, float] | None:
        """Return the bytes of an exact step and of a compressed one, or None where there was but one kind.

        Of exact steps the last one counts: the first send less, and a method's own are in full precision.
        """
        exact, compressed = self._steps[True], self._steps[False]
        return {True: exact[-1][2], False: mean(step[2] for step in compressed)} if exact and compressed else None

    def of(self, *, exact: bool) -> StepTimes | None:
        """Return what steps of a kind take, or None where there were too few of them."""
        steps = _longest(self._steps[True]) if exact else self._steps[False]
        if len(steps) < LEAST:
            return None
        seconds, waits, sent = zip(*steps, strict=True)
        return StepTimes(median(seconds), waits, median(sent))


def _longest(steps: Iterable[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """Return the steps that sent most, and about as much as each other; those that sent less, if they are too few."""
    found: list[tuple[float, float, int]] = []
    rest = sorted(steps, key=itemgetter(2), reverse=True)
    while rest and len(found) < LEAST:
        found = [step for step in rest if step[2] > ALIKE * rest[0][2]]
        rest = rest[len(found) :]
    return found


#: Returns whether a step of this job is exact; None where nobody knows beforehand.
IsExact = Callable[[int], bool] | None


def in_words(metrics: Metrics, pace: Pace, is_exact: IsExact, step: int, total: int | None) -> str:
    """Return a verdict for people; empty before anything was sent.

    Args:
        step: the next one.
        total: the length of the training, if known.
    """
    if not metrics.bytes_sent:
        return ""
    return "; ".join(
        filter(None, (ratio(metrics) + _expected(metrics, pace.sent(), is_exact, step, total), saving(metrics, pace)))
    )


def ratio(metrics: Metrics) -> str:
    """Return the ratio so far in words; empty before anything was sent."""
    return f"{metrics.times_fewer_bytes:.1f} times fewer bytes than a float32 ring" if metrics.bytes_sent else ""


def _expected(metrics: Metrics, each: dict[bool, float] | None, is_exact: IsExact, step: int, total: int | None) -> str:
    """Return the ratio that these rounds come to, in words; nothing where that is unknown, or there is but one kind."""
    if not each or is_exact is None or (total is not None and step >= total):
        return ""
    dense = metrics.bytes_dense / metrics.steps
    if total is None:
        share = _share(is_exact, range(step + AHEAD, step + 2 * AHEAD))
        return f", {dense / (share * each[True] + (1 - share) * each[False]):.1f} in the long run"
    left, near = total - step, range(step, min(total, step + AHEAD))
    coming = len(near) * _share(is_exact, near)
    if left > len(near):
        coming += (left - len(near)) * _share(is_exact, range(near.stop, near.stop + AHEAD))
    sent = metrics.bytes_sent + coming * each[True] + (left - coming) * each[False]
    return f", {dense * (metrics.steps + left) / sent:.1f} expected at step {total:,}"


def _share(is_exact: Callable[[int], bool], steps: range) -> float:
    return sum(map(is_exact, steps)) / len(steps)


def saving(metrics: Metrics, pace: Pace) -> str:
    """Return in words what compression saves; empty where nothing is compressed."""
    exact, compressed = pace.of(exact=True), pace.of(exact=False)
    if not metrics.bytes_compressed:
        return ""
    if not exact or not compressed:
        if metrics.exact_steps:
            return "too few steps yet to say what compression saves"
        return "no step was exact, so nothing shows what compression saves: hvd-compress headroom measures it"
    if exact.sent <= compressed.sent:
        return "exact steps send no more bytes than compressed ones"
    dense = metrics.bytes_dense / metrics.steps
    if exact.sent < SHOWS * dense:
        return "no exact step sent enough to show what compression saves: hvd-compress headroom measures it"
    slope = (dense - compressed.sent) / (exact.sent - compressed.sent)
    saved, least = slope * (exact.waits - compressed.waits), SMALL * compressed.seconds
    waits = f"training waits {compressed.waits:.2g} s a step for compressed gradients"
    if saved > least and exact.clearly_above(compressed):
        return f"saves about {saved:.2g} s of each step: {waits}, about {compressed.waits + saved:.2g} s for float32"
    if saved > least:
        return (
            f"no clear saving: {waits} and {exact.waits:.2g} s for exact ones, and steps differ much among themselves"
        )
    return f"this network does not need compression: {waits}, {exact.waits:.2g} s for exact ones"
