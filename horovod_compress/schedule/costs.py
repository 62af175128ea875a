"""What a step costs under a choice of buckets: the model that schedules are chosen by.

Gradients arrive one after the other; each bucket then takes its turn on the exchange thread (encoding and
exchange) and after that on the decoding thread. Both costs are taken to be affine in the bucket's elements.

    start_i = max(end of the exchange of bucket i-1, arrival of the last gradient of bucket i)
    end of the exchange_i = start_i + a + k n_i
    end of the decoding_i = max(end of the exchange_i, end of the decoding_{i-1}) + b + l n_i
    step = end of the decoding of the last bucket

This is MergeComp's objective (arXiv:2103.15195) with decoding as a third stage of its own. Where the threads share
processors with each other, or with those of other ranks, steps of many buckets take longer than this; see
:func:`adjusted`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median


@dataclass(frozen=True)
class Affine:
    """Seconds for a number of elements: ``fixed + each * elements``."""

    fixed: float
    each: float

    def __call__(self, elements: float) -> float:
        return self.fixed + self.each * elements


@dataclass(frozen=True)
class Costs:
    """What a bucket costs.

    Attributes:
        exchange: encoding and exchange, on the exchange thread.
        decode: on the decoding thread.
    """

    exchange: Affine
    decode: Affine


@dataclass(frozen=True)
class Arrivals:
    """The gradients of a step, in the order in which they come.

    Attributes:
        counts: elements of each.
        seconds: when each is there; never falling.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]


def step_seconds(arrivals: Arrivals, groups: Sequence[int], costs: Costs | Sequence[Costs]) -> float:
    """Return when the last result is there.

    Args:
        groups: how many consecutive tensors each bucket holds.
        costs: of all buckets, or of each.
    """
    kinds = [costs] * len(groups) if isinstance(costs, Costs) else costs
    sent = decoded = 0.0
    first = 0
    for number, kind in zip(groups, kinds, strict=True):
        stop = first + number
        elements = sum(arrivals.counts[first:stop])
        sent = max(sent, arrivals.seconds[stop - 1]) + kind.exchange(elements)
        decoded = max(sent, decoded) + kind.decode(elements)
        first = stop
    return decoded


@dataclass(frozen=True)
class Step:
    """A step that was measured.

    Attributes:
        groups: how many consecutive tensors each bucket held.
        kinds: the place of each bucket's costs.
        seconds: from first gradient to last result.
    """

    groups: Sequence[int]
    kinds: Sequence[int]
    seconds: float


_AMOUNTS = 17  # that are tried, small ones the closest
_MOST = 1 / 8  # of the longest step, that may be added to a bucket


def adjusted(kinds: Sequence[Costs], arrivals: Arrivals, steps: Sequence[Step]) -> list[Costs]:
    """Return costs with the fixed part of exchanges raised by what makes the model come nearest to measured steps.

    What a bucket shows of itself is the least that it takes. In a step its threads wait for processors that others
    keep busy, and for ranks that do. What all steps take longer whatever their buckets, as when a rank is always
    late, is taken for such a cost too: few steps do not tell them apart, and too few buckets cost less than too many.
    """
    most = _MOST * max(step.seconds for step in steps)
    amounts = [most * (number / (_AMOUNTS - 1)) ** 2 for number in range(_AMOUNTS)]

    def misses(raised: Sequence[Costs]) -> float:
        """Return by which shares of the steps the model misses them."""
        found = [step_seconds(arrivals, step.groups, [raised[kind] for kind in step.kinds]) for step in steps]
        return sum(abs(seconds - step.seconds) / step.seconds for seconds, step in zip(found, steps, strict=True))

    choices = (
        [replace(one, exchange=replace(one.exchange, fixed=one.exchange.fixed + amount)) for one in kinds]
        for amount in amounts
    )
    return min(choices, key=misses)


def fitted(points: Sequence[tuple[float, float]], fixed: float | None = None) -> Affine:
    """Return an affine cost through measured (elements, seconds), neither part of it negative.

    The slope is the median of the slopes between all pairs that differ enough (Theil and Sen), so that a few
    disturbed measurements do not count.

    Args:
        fixed: the fixed part, for points that differ too little to show it; without it, all of it is fixed then.

    Raises:
        ValueError: there are no points.
    """
    if not points:
        raise ValueError("no measured costs to fit")
    most = max(n for n, _ in points)
    pairs = [(p, q) for i, p in enumerate(points) for q in points[:i] if abs(p[0] - q[0]) > 0.1 * most]
    if not pairs and fixed is not None:
        return Affine(fixed, max(0.0, median((seconds - fixed) / n for n, seconds in points)))
    each = max(0.0, median((q[1] - p[1]) / (q[0] - p[0]) for p, q in pairs)) if pairs else 0.0
    rest = median(seconds - each * n for n, seconds in points)
    if rest < 0:  # the slope is too steep then: through the origin and the largest bucket
        return Affine(0.0, median(seconds / n for n, seconds in points if n > 0.5 * most))
    return Affine(rest, each)
