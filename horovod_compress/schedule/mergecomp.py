"""MergeComp: buckets found by measuring steps, without a model of method or network (arXiv:2103.15195).

    y = 1: one bucket. For y = 2, 3, ... up to max_groups: search the place of one more cut, where the time of a
    step as a function of that place is taken to fall and then rise; stop when the gain is below alpha

What we changed: the paper tries every combination of the y - 2 cuts before. Here only the one beside the new cut may
move, so that a search takes tens of steps and not thousands. The new cut goes into the bucket that takes longest, at
places that lie evenly in time and not in tensors, see :func:`seconds_of_tensors`; and the best two choices are
measured once more. A step is timed from its first gradient to its last result. Compressor state is carried over from
trial to trial, where the paper's code clears it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise

from ..errors import ConfigError
from .trial import Choice, Measured, SearchSpace, Tuning

MAX_GROUPS = 4
ALPHA = 0.03  # a gain below this share, of the time from first gradient to last result, is not worth another bucket
_CELLS = 13  # a new cut is placed to about 1/13 of the time of the bucket that it divides
_WIDER_CELLS = 8  # and the cut beside it to 1/8 of the time of the buckets that it parts
_FINALISTS = 2  # are measured twice: the first of many is often one that was lucky

Cuts = tuple[int, ...]


def tune(job: SearchSpace) -> Tuning:
    """Search the buckets of a job; see :mod:`.trial`. All of them are compressed."""
    most, search = check(job.argument), _MergeCompSearch(job.count)
    best: Cuts = ()
    yield from search.seconds(best)
    for _ in range(1, min(most, job.count)):
        cuts = yield from search.one_more(best)
        if search.found[cuts].step > (1 - ALPHA) * search.found[best].step:
            break
        best = cuts
    chosen = yield from search.run_off()
    return Choice(sizes(chosen, job.count))


def check(argument: str) -> int:
    """Refuse an argument that is no number, and return the most buckets of ``"mergecomp:4"``.

    Raises:
        ConfigError: the argument is no number of at least 1.
    """
    if argument and not (argument.isdecimal() and int(argument) >= 1):
        raise ConfigError(f'schedule="mergecomp:N" takes a number of buckets, got {argument!r}')
    return int(argument or MAX_GROUPS)


def sizes(cuts: Cuts, count: int) -> tuple[int, ...]:
    """Return how many tensors lie between cuts."""
    return tuple(stop - start for start, stop in pairwise([0, *cuts, count]))


class _MergeCompSearch:
    """What was tried so far, and what it showed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.found: dict[Cuts, Measured] = {}

    def seconds(self, cuts: Cuts) -> Generator[Choice, Measured, float]:
        """Return the seconds of a step under some cuts, measured once."""
        if cuts not in self.found:
            self.found[cuts] = yield Choice(sizes(cuts, self._count))
        return self.found[cuts].step

    def one_more(self, before: Cuts) -> Generator[Choice, Measured, Cuts]:
        """Return these cuts and one more, at the best place found in the bucket that takes longest."""
        takes = self._takes(before)
        divisible = [(low, high) for low, high in pairwise([0, *before, self._count]) if high - low > 1]
        low, high = max(divisible, key=lambda ends: sum(takes[slice(*ends)]))
        cuts = yield from self._lowest([_with(before, cut) for cut in places(takes, low, high, _CELLS)])
        (new,) = set(cuts) - set(before)
        return (yield from self._move_beside(cuts, cuts.index(new)))

    def _move_beside(self, cuts: Cuts, new: int) -> Generator[Choice, Measured, Cuts]:
        """Return the cuts with the one before or behind the new one at a better place, if there is one.

        Of the two the one between the buckets that take longest together: it was placed for fewer buckets.
        """
        takes, ends = self._takes(cuts), [0, *cuts, self._count]
        beside = [place for place in (new - 1, new + 1) if 0 <= place < len(cuts)]
        if not beside:
            return cuts
        older = max(beside, key=lambda place: sum(takes[ends[place] : ends[place + 2]]))
        others = cuts[:older] + cuts[older + 1 :]
        choices = [_with(others, cut) for cut in places(takes, ends[older], ends[older + 2], _WIDER_CELLS)]
        moved = yield from self._lowest(choices)
        return min((cuts, moved), key=lambda choice: self.found[choice].step)

    def _takes(self, cuts: Cuts) -> list[float]:
        return seconds_of_tensors(self.found[cuts], sizes(cuts, self._count))

    def _lowest(self, choices: Sequence[Cuts]) -> Generator[Choice, Measured, Cuts]:
        """Return the choice with the shortest step, taking its seconds to fall and then rise.

        Kiefer's search: of all that then find the lowest for certain, it measures the fewest; of twelve choices five.
        """
        shorter, longer = 1, 2
        while shorter + longer <= len(choices):
            shorter, longer = longer, shorter + longer
        before = -1  # the lowest is one of the shorter + longer - 1 behind it, of which some may lie beyond the last
        while longer > 1:
            left, right = before + shorter, before + longer
            if right < len(choices):
                at_left = yield from self.seconds(choices[left])
                at_right = yield from self.seconds(choices[right])
                if at_left > at_right:
                    before = left
            shorter, longer = longer - shorter, shorter
        lowest = choices[before + 1]
        yield from self.seconds(lowest)
        return lowest

    def run_off(self) -> Generator[Choice, Measured, Cuts]:
        """Return the best cuts, after the first few were measured again."""
        best = sorted(self.found, key=lambda cuts: self.found[cuts].step)[:_FINALISTS]
        if len(best) == 1:
            return best[0]
        means: dict[Cuts, float] = {}
        for cuts in best:
            again = yield Choice(sizes(cuts, self._count))
            means[cuts] = (self.found[cuts].step + again.step) / 2
        return min(means, key=lambda cuts: means[cuts])


def _with(cuts: Cuts, cut: int) -> Cuts:
    return tuple(sorted((*cuts, cut)))


def places(takes: Sequence[float], low: int, high: int, cells: int) -> list[int]:
    """Return where to try a cut among some tensors: places at least a cell apart in time, or the last one.

    Args:
        takes: the seconds of every tensor.
        cells: parts of their time.
    """
    cell, found, passed = sum(takes[low:high]) / cells, [], 0.0
    for cut in range(low + 1, high):
        passed += takes[cut - 1]
        if passed >= cell:
            found.append(cut)
            passed = 0.0
    return found or [high - 1]


def seconds_of_tensors(measured: Measured, groups: Sequence[int]) -> list[float]:
    """Return what each tensor takes: waiting for its gradient, and its share of the bucket's exchange and decoding.

    So a tensor with most of the elements takes most of the time, as does one for which backward works long.

    Args:
        groups: how many tensors each bucket holds.
    """
    elements, arrived = measured.arrivals.counts, (0.0, *measured.arrivals.seconds)
    busy = [cost.exchange + cost.decode for cost in measured.buckets]
    # Where nothing of some bucket was exchanged, its costs are missing: then all elements are taken to cost alike.
    alike = sum(busy) / max(1, sum(elements)) if len(busy) < len(groups) else None
    found: list[float] = []
    for place, number in enumerate(groups):
        mine = elements[len(found) : len(found) + number]
        each = busy[place] / max(1, sum(mine)) if alike is None else alike
        found += [each * count for count in mine]
    return [after - before + share for (before, after), share in zip(pairwise(arrived), found, strict=True)]
