"""Marks of time in a running step: when gradients arrive, and what each bucket costs."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

from .costs import Arrivals
from .plan import Plan, TensorSpec
from .trial import BucketCost


class Watch:
    """The times of the steps since it was made. Marks are appended, from whichever thread they happen on."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._begins: list[float] = []
        self._spoiled: set[int] = set()  # of these
        self._offers: list[tuple[int, float]] = []
        self._exchanges: dict[int, list[float]] = defaultdict(list)
        self._decodes: dict[int, list[float]] = defaultdict(list)
        self._results: list[float] = []  # when buckets were decoded

    def begin(self) -> None:
        """Mark that a step's first gradient is there."""
        self._begins.append(time.perf_counter())

    def spoil(self) -> None:
        """Mark that the step under way does not count, as rounds with values that are not finite are cut short."""
        self._spoiled.add(len(self._begins) - 1)

    def offered(self, index: int) -> None:
        """Mark that a tensor, by its place in the plan, was taken in."""
        self._offers.append((index, time.perf_counter()))

    def _counts(self) -> bool:
        return len(self._begins) - 1 not in self._spoiled

    def exchanged(self, bucket: int, seconds: float) -> None:
        if self._counts():
            self._exchanges[bucket].append(seconds)

    def decoded(self, bucket: int, seconds: float) -> None:
        if self._counts():
            self._decodes[bucket].append(seconds)
        self._results.append(time.perf_counter())

    def steps(self) -> int:
        """Return how many steps have begun that count; the same on every rank."""
        return len(self._begins) - len(self._spoiled)

    def step_seconds(self) -> list[float]:
        """Return the seconds of the steps that count, from first gradient to last result; as many on every rank.

        What comes between two steps, as loading the next batch, is left out, as no choice of buckets changes it. So
        is the first step, as it pays for new buffers.
        """
        steps = enumerate(pairwise(self._begins))
        counted = [step for number, step in steps if number and number not in self._spoiled]
        return [self._last_result(begin, after) - begin for begin, after in counted]

    def _last_result(self, begin: float, after: float) -> float:
        """Return when a step's last result was there; the next step's begin without any, so that there is a number."""
        return max((at for at in self._results if begin < at < after), default=after)

    def order(self) -> list[int]:
        """Return the tensors, by place in the plan, as they arrive."""
        seconds, offered = self._arrivals(), {index for index, _ in self._offers}
        return sorted(range(len(seconds)), key=lambda index: (seconds[index], index not in offered))

    def arrivals(self, tensors: Sequence[TensorSpec]) -> Arrivals:
        """Return when these tensors, and all before them, were there after the first of a step, medians over steps."""
        seconds = dict(zip(self._plan.names(), self._arrivals(), strict=True))
        found = accumulate((seconds[tensor.name] for tensor in tensors), max)
        return Arrivals(tuple(tensor.count for tensor in tensors), tuple(found))

    def _arrivals(self) -> list[float]:
        """Return when each tensor is there after the first one, medians over steps."""
        found: list[list[float]] = [[] for _ in self._plan.names()]
        for index, at in self._offers:
            begun = bisect_right(self._begins, at)
            if begun:
                found[index].append(at - self._begins[begun - 1])
        known = [median(seconds) for seconds in found if seconds]
        # What never arrives in backward, as sparse gradients do not, is counted in at the end.
        return [median(seconds) if seconds else max(known, default=0.0) for seconds in found]

    def buckets(self) -> dict[int, BucketCost]:
        """Return the costs of every bucket of a method that was exchanged, by number, the lowest over steps."""
        return {
            bucket.index: BucketCost(
                bucket.count, _least(self._exchanges[bucket.index]), _least(self._decodes[bucket.index]), bucket.plain
            )
            for bucket in self._plan.buckets
            if bucket.compressed and self._exchanges.get(bucket.index) and self._decodes.get(bucket.index)
        }


def _least(values: list[float]) -> float:
    """Return the smallest, without the first step where there are others: what disturbs only adds."""
    return min(values[1:] or values)
