"""LayerFusion: the buckets that make a step shortest by the cost model, exactly and without parameters of its own.

After Sketch-Fusion SGD's layer fusion (JPDC 185, 2024, 104811), for every method. Let f be the pairs (exchange
done, decoding done) that some grouping of the first j tensors reaches and none beats in both:

    f[j] = undominated of  { (e, max(e, d') + decode(n)) : (e', d') in f[i], i < j },
           e = max(e', arrival of tensor j) + exchange(n),  n = elements of tensors i+1 .. j

The best grouping is the one behind the smallest second number of f[all].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from .costs import Arrivals, Costs, Step, adjusted, fitted
from .plan import check_no_argument
from .trial import BucketCost, Choice, SearchSpace, Tuning

FINE = 8  # buckets of the measurement that shows fixed costs

check = partial(check_no_argument, "layerfusion")


class _Reached:
    """Everything that groupings of some first tensors reach: one entry for each that none beats in both times."""

    def __init__(self, room: int) -> None:
        self.count = 0
        self.sent, self.decoded, self.ends = (np.zeros(room) for _ in range(3))
        self.stops, self.before, self.kinds = (np.zeros(room, dtype=np.int64) for _ in range(3))

    def add(
        self, sent: np.ndarray, decoded: np.ndarray, end: int, stop: int, before: np.ndarray, kinds: np.ndarray
    ) -> None:
        while self.count + sent.size > self.sent.size:
            for name in ("sent", "decoded", "ends", "stops", "before", "kinds"):
                array = getattr(self, name)
                setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        new = slice(self.count, self.count + sent.size)
        self.sent[new], self.decoded[new], self.ends[new] = sent, decoded, end
        self.stops[new], self.before[new], self.kinds[new] = stop, before, kinds
        self.count = new.stop


def best(arrivals: Arrivals, costs: Costs) -> list[int]:
    """Return how many tensors each bucket holds in a grouping that is optimal by the cost model.

    It takes time in proportion to the square of the number of tensors.
    """
    return best_of(arrivals, [costs])[0]


def best_of(arrivals: Arrivals, kinds: Sequence[Costs]) -> tuple[list[int], list[int]]:
    """Return an optimal grouping where every bucket may be of several kinds, such as compressed and not.

    Returns:
        How many tensors each bucket holds, and the place of its kind in ``kinds``.
    """
    reached = _Reached(16 * (1 + len(arrivals.counts)))
    reached.add(np.zeros(1), np.zeros(1), 0, 0, np.full(1, -1), np.zeros(1, dtype=np.int64))
    for stop, end in enumerate(accumulate(arrivals.counts), 1):
        before = np.arange(reached.count)
        elements = end - reached.ends[before]
        begun = np.maximum(reached.sent[before], arrivals.seconds[stop - 1])
        sent = np.concatenate([begun + (c.exchange.fixed + c.exchange.each * elements) for c in kinds])
        decoded = np.maximum(sent, np.tile(reached.decoded[before], len(kinds)))
        decoded += np.concatenate([c.decode.fixed + c.decode.each * elements for c in kinds])
        kept = _undominated(sent, decoded)
        reached.add(sent[kept], decoded[kept], end, stop, kept % len(before), kept // len(before))
    last = np.flatnonzero(reached.stops[: reached.count] == len(arrivals.counts))
    return _groups(reached, int(last[np.argmin(reached.decoded[last])]))


def _undominated(sent: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """Return the entries that no other one beats in one time and equals or beats in the other."""
    order = np.lexsort((decoded, sent))
    lowest = np.minimum.accumulate(decoded[order])
    return order[np.concatenate([[True], lowest[1:] < lowest[:-1]])]


def _groups(reached: _Reached, at: int) -> tuple[list[int], list[int]]:
    groups: list[int] = []
    kinds: list[int] = []
    while (before := int(reached.before[at])) >= 0:
        groups.append(int(reached.stops[at] - reached.stops[before]))
        kinds.append(int(reached.kinds[at]))
        at = before
    return groups[::-1], kinds[::-1]


# ---- in a running job ----


def tune(job: SearchSpace) -> Tuning:
    """Measure two choices of buckets of unlike sizes, and return the best one by what they and their steps cost.

    All of them are compressed.
    """
    whole = Choice((job.count,))
    coarse = yield whole
    eighths = Choice(tuple(even(coarse.arrivals.counts, FINE)))
    fine = yield eighths
    shown = costs_of([*coarse.buckets, *fine.buckets])
    steps = [Step(choice.counts, [0] * len(choice.counts), m.step) for choice, m in ((whole, coarse), (eighths, fine))]
    return Choice(tuple(best(coarse.arrivals, adjusted([shown], coarse.arrivals, steps)[0])))


def costs_of(buckets: Sequence[BucketCost], like: Costs | None = None) -> Costs:
    """Return the costs that measured buckets show.

    Args:
        like: has the fixed costs, where sizes differ too little to show them.
    """
    return Costs(
        fitted([(one.elements, one.exchange) for one in buckets], like.exchange.fixed if like else None),
        fitted([(one.elements, one.decode) for one in buckets], like.decode.fixed if like else None),
    )


def even(counts: Sequence[int], number: int) -> list[int]:
    """Return about so many buckets of about equal numbers of elements."""
    total, groups, filled = sum(counts), [0], 0
    for count in counts:
        if groups[-1] and filled + count / 2 > total * len(groups) / number:
            groups.append(0)
        groups[-1] += 1
        filled += count
    return groups
