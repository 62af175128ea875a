"""Buckets that adaptive schedules try in a running job: what is chosen, as buckets, and what they cost.

An adaptive schedule is a generator: it yields the buckets that it wants tried, is sent what was measured, and
returns the buckets to keep. It runs on rank 0 only, so it may look at clocks; the other ranks follow.

It chooses groups of consecutive tensors and knows nothing of their kinds. A group becomes one bucket for each kind that
it holds, of another method, dtype or device, and costs what all its buckets cost.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import median

from .costs import Arrivals
from .plan import Plan, TensorSpec


@dataclass(frozen=True)
class SearchSpace:
    """What a schedule chooses for.

    Attributes:
        count: tensors, in the order in which their gradients arrive.
        argument: what stands after the schedule's name, as 4 in ``"mergecomp:4"``.
        may_be_plain: whether buckets may be left uncompressed.
    """

    count: int
    argument: str = ""
    may_be_plain: bool = False


@dataclass(frozen=True)
class Choice:
    """Groups of tensors to try or to keep; a group is a bucket, or several where its tensors are of several kinds.

    Attributes:
        counts: how many consecutive tensors each holds.
        plain: the places of those that travel uncompressed.
        why: for people.
    """

    counts: tuple[int, ...]
    plain: frozenset[int] = frozenset()
    why: str = field(default="", compare=False)


@dataclass(frozen=True)
class BucketCost:
    """Seconds of one bucket, or of all buckets of a group: the shortest over steps.

    Waiting for slower ranks does not count, where it can be told apart.
    """

    elements: int
    exchange: float
    decode: float
    plain: bool = False


@dataclass(frozen=True)
class Measured:
    """What some steps with one choice of buckets took.

    Attributes:
        step: seconds from the first gradient of a step to its last result, mean over ranks, the shortest over steps.
        arrivals: when gradients were there after the first one, on rank 0.
        buckets: of each group in order, but for those of which nothing was exchanged.
    """

    step: float
    arrivals: Arrivals
    buckets: Sequence[BucketCost]


Tuning = Generator[Choice, Measured, Choice]


#: The number of the method, dtype and device.
TensorKind = tuple[int, str, str]


def by_kind(tensors: Iterable[TensorSpec], method: Callable[[str], int]) -> dict[TensorKind, list[TensorSpec]]:
    """Return the tensors of each kind in their order; the kind whose last tensor comes first is the first.

    Args:
        method: returns the number of the method of a tensor, by name.
    """
    kinds: dict[TensorKind, list[TensorSpec]] = {}
    for tensor in tensors:
        kind = (method(tensor.name), tensor.dtype, tensor.device)
        own = kinds.pop(kind, [])
        own.append(tensor)
        kinds[kind] = own  # at the end now, as this tensor is the last one so far
    return kinds


@dataclass(frozen=True)
class Grouped:
    """A choice as buckets.

    Attributes:
        plan: its buckets in order, and after them some that the choice is not about.
        groups: the numbers of the buckets of each group.
        plain: the places of groups that are left uncompressed.
    """

    plan: Plan
    groups: tuple[range, ...]
    plain: frozenset[int]

    def costs(self, of_buckets: Mapping[int, BucketCost]) -> list[BucketCost]:
        """Return what each group costs, leaving out those of which no bucket was exchanged."""
        found = []
        for place, group in enumerate(self.groups):
            if known := [of_buckets[bucket] for bucket in group if bucket in of_buckets]:
                elements, exchange, decode = zip(
                    *((one.elements, one.exchange, one.decode) for one in known), strict=True
                )
                found.append(BucketCost(sum(elements), sum(exchange), sum(decode), place in self.plain))
        return found


def as_buckets(
    choice: Choice,
    tensors: Sequence[TensorSpec],
    method: Callable[[str], int],
    may_be_plain: Callable[[int], bool],
    behind: Sequence[Sequence[TensorSpec]] = (),
) -> Grouped:
    """Return a choice as buckets.

    Args:
        tensors: in the order in which their gradients arrive.
        method: returns the number of the method of a tensor, by name.
        may_be_plain: returns whether buckets of a method can be left uncompressed; others of the group stay as they
            are.
        behind: the tensors of further buckets, which have no method.
    """
    runs: list[tuple[Sequence[TensorSpec], int, bool]] = []
    groups = []
    stop = 0
    for place, number in enumerate(choice.counts):
        start, stop = stop, stop + number
        kinds = by_kind(tensors[start:stop], method)
        groups.append(range(len(runs), len(runs) + len(kinds)))
        runs += [(own, of, place in choice.plain and may_be_plain(of)) for (of, _, _), own in kinds.items()]
    return Grouped(Plan.of([*runs, *((own, 0, False) for own in behind)]), tuple(groups), choice.plain)


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
        """Mark that a tensor, by its place in the plan, was handed over; it may wait before it is taken in."""
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
        # Where a step has no result, the next one's begin stands for it, so that there is a number.
        return [max((at for at in self._results if b < at < end), default=end) - b for b, end in counted]

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
