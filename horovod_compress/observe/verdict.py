"""What compression is worth in this job: the ratio now and later, and the seconds that a step takes less with it.

Some rounds of a job are exact. They send gradients uncompressed over the same network as the compressed ones, so the
two kinds of step can be compared where the job runs, whatever else a step does:

    t, b    median seconds of a step and bytes that it sends, of each kind
    time of a float32 step = t_compressed + (t_exact - t_compressed) (b_float32 - b_compressed) / (b_exact - b_compressed)

Exact rounds often send bfloat16, half of what float32 takes; hence the straight line through the two kinds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median

from .metrics import Metrics

#: The first steps open connections and fill caches: they are not looked at.
FIRST = 3
#: How many steps of each kind it takes to compare them, and how many of the last ones are kept.
LEAST, KEPT = 5, 200
#: A saving below this part of a step is none.
SMALL = 0.03
#: So many steps ahead are looked at one by one; after these, exact rounds come at the same distances.
AHEAD = 10_000
#: The standard error of a median, in units of the median distance from it over the root of the number of values.
_ERROR = 1.2533 * 1.4826


@dataclass(frozen=True)
class Kind:
    """Steps of one kind: seconds that one takes, how far to trust that, and bytes that it sends."""

    seconds: float
    error: float
    sent: float


class Pace:
    """How long steps take, exact and compressed ones apart. It costs a look at the clock for each step."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._steps: dict[bool, deque[tuple[float, int]]] = {exact: deque(maxlen=KEPT) for exact in (True, False)}
        self._last: tuple[float, int, int, int] | None = None  # time, steps, exact and compressed bytes so far

    def mark(self) -> None:
        """Begin a step, which ends the one before."""
        metrics, now = self._metrics, time.perf_counter()
        last, self._last = self._last, (now, metrics.steps, metrics.bytes_exact, metrics.bytes_compressed)
        if last is None or metrics.steps != last[1] + 1 or metrics.steps <= FIRST:
            return
        exact, compressed = metrics.bytes_exact - last[2], metrics.bytes_compressed - last[3]
        if exact or compressed:
            self._steps[not compressed].append((now - last[0], exact + compressed))

    def of(self, *, exact: bool) -> Kind | None:
        """Return what steps of a kind take, or None where there were too few of them."""
        steps = self._steps[exact]
        if len(steps) < LEAST:
            return None
        middle = median(seconds for seconds, _ in steps)
        spread = median(abs(seconds - middle) for seconds, _ in steps)
        return Kind(middle, _ERROR * spread / len(steps) ** 0.5, median(sent for _, sent in steps))


def in_words(metrics: Metrics, pace: Pace, is_exact: Callable[[int], bool], step: int, total: int | None) -> str:
    """Return a verdict for people; empty before anything was sent.

    Args:
        is_exact: whether a step of this job is exact.
        step: the next one.
        total: the length of the training, if known.
    """
    if not metrics.bytes_sent:
        return ""
    return "; ".join(filter(None, (ratio(metrics) + _expected(metrics, is_exact, step, total), saving(metrics, pace))))


def ratio(metrics: Metrics) -> str:
    """Return the ratio so far in words; empty before anything was sent."""
    return f"{metrics.times_fewer_bytes:.1f} times fewer bytes than a float32 ring" if metrics.bytes_sent else ""


def _expected(metrics: Metrics, is_exact: Callable[[int], bool], step: int, total: int | None) -> str:
    """Return the ratio that these rounds come to, in words; nothing where there is but one kind."""
    steps, exact = metrics.steps, metrics.exact_steps
    if not 0 < exact < steps or (total is not None and step >= total):
        return ""
    each = {True: metrics.bytes_exact / exact, False: metrics.bytes_compressed / (steps - exact)}
    dense = metrics.bytes_dense / steps
    if total is None:
        share = _share(is_exact, range(step + AHEAD, step + 2 * AHEAD))
        return f", {dense / (share * each[True] + (1 - share) * each[False]):.1f} in the long run"
    left, near = total - step, range(step, min(total, step + AHEAD))
    coming = len(near) * _share(is_exact, near)
    if left > len(near):
        coming += (left - len(near)) * _share(is_exact, range(near.stop, near.stop + AHEAD))
    sent = metrics.bytes_sent + coming * each[True] + (left - coming) * each[False]
    return f", {dense * (steps + left) / sent:.1f} expected at step {total:,}"


def _share(is_exact: Callable[[int], bool], steps: Iterable[int]) -> float:
    found = [is_exact(step) for step in steps]
    return sum(found) / len(found)


def saving(metrics: Metrics, pace: Pace) -> str:
    """Return in words what compression saves; empty where nothing is compressed."""
    exact, compressed = pace.of(exact=True), pace.of(exact=False)
    if not metrics.bytes_compressed:
        return ""
    if not (exact and compressed):
        if metrics.exact_steps:
            return "too few steps yet to say what compression saves"
        return "no step was exact, so nothing shows what compression saves: hvd-compress headroom measures it"
    if exact.sent <= compressed.sent:
        return "nothing is saved: exact steps send no more bytes"
    dense = metrics.bytes_dense / metrics.steps
    slope = (dense - compressed.sent) / (exact.sent - compressed.sent)
    saved = slope * (exact.seconds - compressed.seconds)
    error = slope * (exact.error**2 + compressed.error**2) ** 0.5
    least = SMALL * compressed.seconds
    took = f"a compressed step takes {compressed.seconds:.3g} s"
    if saved > max(least, 2 * error):
        plain = compressed.seconds + saved
        return f"saves about {saved:.2g} s a step: {took}, a float32 one about {plain:.3g} s"
    if saved + 2 * error > least and 2 * error > least and saved > 0:
        return f"no clear saving: {took}, and steps differ too much from each other to tell"
    return f"this network does not need compression: {took}, an exact one {exact.seconds:.3g} s"
