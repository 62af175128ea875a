"""The default: buckets by a model of costs that the running job shows, then improved by measuring.

    1  measure one bucket, those of "size:25MB", and eight equal ones, some of them left uncompressed
    2  the best buckets by the costs of everything measured so far (see :mod:`.layerfusion`), each compressed or
       not; measure them, and again with what this showed; and the best two buckets, in case that a bucket costs
       more still in a step where processors are short
    3  all buckets uncompressed, where the model says that this comes near
    4  move cuts of the best ones, the last cut first: the buckets behind it hide least
    5  measure the best few once more, and keep what took the shortest step; of steps that are as good as equal the
       shortest one with nothing compressed, or else the one with the least work

After MergeComp's search (arXiv:2103.15195), which measures only, and Sketch-Fusion's layer fusion, which computes
only; the mixture is ours.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from .costs import Arrivals, Costs, Step, adjusted, step_seconds
from .layerfusion import FINE, best_of, costs_of, even
from .plan import USUAL_SIZE, check_no_argument, parse_bytes, runs_within
from .trial import BucketCost, Choice, Measured, SearchSpace, Tuning

_ROUNDS = 2  # how often the model is asked again with what it proposed measured
_MOVES = 3  # cuts that are moved at most
_ATOMS = 128  # more tensors than that are planned for in bunches
_FINALISTS = 3  # are measured twice
_NEAR = 1.1  # the model is trusted to tell what takes this much longer
#: Steps, from first gradient to last result, that differ by less are as good as equal: noise is of that size.
ALIKE = 1.01

check = partial(check_no_argument, "auto")

Trying = Generator[Choice, Measured, Measured]


class _AutoSearch:
    """What was tried so far, and what it showed."""

    def __init__(self, job: SearchSpace) -> None:
        self.job = job
        self.found: dict[Choice, Measured] = {}
        self.costs: list[BucketCost] = []
        self.usual = Choice((job.count,))
        #: What the choice is among at last; empty for all.
        self.final: list[Choice] = []

    def measure(self, choice: Choice) -> Trying:
        if choice not in self.found:
            measured = yield choice
            self.found[choice] = measured
            self.costs += measured.buckets
        return self.found[choice]

    def best(self) -> Choice:
        """Return the choice with the shortest step."""
        return min(self.final or self.found, key=lambda choice: self.found[choice].step)

    def kinds(self) -> list[Costs]:
        """Return the costs of compressed buckets, and those of plain ones where they may be, as steps show them."""
        shown = [cost for cost in self.costs if cost.elements]
        compressed = costs_of([cost for cost in shown if not cost.plain])
        plain = [cost for cost in shown if cost.plain]
        found = [compressed, costs_of(plain, like=compressed)] if plain else [compressed]
        steps = []
        for choice, measured in self.found.items():
            places = [int(bool(plain) and place in choice.plain) for place in range(len(choice.counts))]
            steps.append(Step(choice.counts, places, measured.step))
        return adjusted(found, self.found[Choice((self.job.count,))].arrivals, steps)


def tune(job: SearchSpace) -> Tuning:
    """Search the buckets of a job; see :mod:`.trial`."""
    search = _AutoSearch(job)
    whole = yield from search.measure(Choice((job.count,)))
    counts = whole.arrivals.counts
    search.usual = Choice(tuple(usual(counts)))
    yield from search.measure(search.usual)
    yield from search.measure(probe(counts, job.may_be_plain))
    for _ in range(_ROUNDS):
        choice = proposed(whole.arrivals, search.kinds())
        if choice in search.found:
            break
        yield from search.measure(choice)
    if job.count > 1:
        yield from search.measure(two(whole.arrivals, search.kinds()[0]))
    kinds = search.kinds()
    if len(kinds) > 1:
        yield from _all_plain(search, whole.arrivals, *kinds)
    yield from _move_cuts(search, counts)
    yield from _run_off(search)
    return _kept(search)


def usual(counts: Sequence[int]) -> list[int]:
    """Return the buckets of ``"size:25MB"`` for tensors of float32."""
    return runs_within(counts, parse_bytes(USUAL_SIZE) // 4)


def probe(counts: Sequence[int], may_be_plain: bool) -> Choice:
    """Return about eight equal buckets, one of them uncompressed and a quarter of another too.

    So the costs of uncompressed buckets show without a step that sends all gradients uncompressed, which takes
    long where compression pays.
    """
    groups = even(counts, FINE)
    if not may_be_plain:
        return Choice(tuple(groups))
    if len(groups) < 3:
        return Choice(tuple(groups), frozenset({len(groups) - 1}))
    middle = len(groups) // 2
    first = sum(groups[:middle])
    quarters = even(counts[first : first + groups[middle]], 4)
    rest = groups[middle] - quarters[0]
    groups[middle : middle + 1] = [quarters[0], *([rest] if rest else [])]
    return Choice(tuple(groups), frozenset({middle, len(groups) - 1}))


def proposed(arrivals: Arrivals, kinds: Sequence[Costs]) -> Choice:
    """Return the best buckets by the cost model; of very many tensors some are taken together."""
    bunches = even(arrivals.counts, _ATOMS) if len(arrivals.counts) > _ATOMS else [1] * len(arrivals.counts)
    ends = list(accumulate(bunches))
    starts = [0, *ends[:-1]]
    together = Arrivals(
        tuple(sum(arrivals.counts[start:end]) for start, end in zip(starts, ends, strict=True)),
        tuple(arrivals.seconds[end - 1] for end in ends),
    )
    groups, found = best_of(together, kinds)
    cuts = [0, *(ends[cut - 1] for cut in accumulate(groups))]
    counts = tuple(stop - start for start, stop in pairwise(cuts))
    return Choice(counts, frozenset(place for place, kind in enumerate(found) if kind))


def two(arrivals: Arrivals, costs: Costs) -> Choice:
    """Return the best two compressed buckets by the cost model."""
    count = len(arrivals.counts)
    every = ((cut, count - cut) for cut in range(1, count))
    return Choice(min(every, key=lambda groups: step_seconds(arrivals, groups, costs)))


def _all_plain(
    search: _AutoSearch, arrivals: Arrivals, compressed: Costs, plain: Costs
) -> Generator[Choice, Measured, None]:
    """Try without any compression, where the model says that this takes little longer."""
    without = proposed(arrivals, [plain])
    without = Choice(without.counts, frozenset(range(len(without.counts))))
    least = min(_predicted(arrivals, choice, compressed, plain) for choice in search.found)
    if _predicted(arrivals, without, compressed, plain) <= _NEAR * least:
        yield from search.measure(without)
        yield from search.measure(Choice(tuple(usual(arrivals.counts)), frozenset(range(len(usual(arrivals.counts))))))


def _predicted(arrivals: Arrivals, choice: Choice, compressed: Costs, plain: Costs) -> float:
    kinds = [plain if place in choice.plain else compressed for place in range(len(choice.counts))]
    return step_seconds(arrivals, choice.counts, kinds)


def _move_cuts(search: _AutoSearch, counts: Sequence[int]) -> Generator[Choice, Measured, None]:
    """Try the neighbours of the best choice; begin anew from a better one, but not for ever."""
    left = _MOVES
    while left:
        best = search.best()
        untried = (choice for choice in neighbours(best, counts) if choice not in search.found)
        for choice in untried:
            left -= 1
            measured = yield from search.measure(choice)
            if measured.step < search.found[best].step or not left:
                break
        else:
            return


def _run_off(search: _AutoSearch) -> Generator[Choice, Measured, None]:
    """Measure the best choices and the usual buckets again: the first of many is often one that was lucky."""
    ranked = sorted(search.found, key=lambda choice: search.found[choice].step)
    if len(ranked) == 1:
        return
    final = dict.fromkeys([*ranked[:_FINALISTS], search.usual])
    for choice in final:
        again = yield choice
        first = search.found[choice]
        search.found[choice] = replace(
            first, step=(first.step + again.step) / 2, buckets=[*first.buckets, *again.buckets]
        )
    search.final = list(final)


def neighbours(choice: Choice, counts: Sequence[int]) -> Iterator[Choice]:
    """Yield choices with one cut moved by half of a bucket beside it, or taken away; the last cuts first."""
    ends = list(accumulate(choice.counts))
    for place in range(len(choice.counts) - 1, 0, -1):
        start, cut, end = ([0, *ends][place - 1], ends[place - 1], ends[place])
        for to in (_middle(counts, cut, end), _middle(counts, start, cut)):
            if start < to < end and to != cut:
                yield Choice(_with(choice.counts, place, to - start, end - to), choice.plain)
        if (place in choice.plain) == (place - 1 in choice.plain):
            merged = (*choice.counts[: place - 1], end - start, *choice.counts[place + 1 :])
            yield Choice(merged, frozenset(p - (p >= place) for p in choice.plain))
    if len(choice.counts) == 1 and (to := _middle(counts, 0, len(counts))) < len(counts):
        yield Choice((to, len(counts) - to), frozenset({0, 1} if choice.plain else ()))


def _with(counts: tuple[int, ...], place: int, before: int, behind: int) -> tuple[int, ...]:
    return (*counts[: place - 1], before, behind, *counts[place + 1 :])


def _middle(counts: Sequence[int], start: int, stop: int) -> int:
    """Return the cut that parts some tensors into halves of about equal size."""
    halves = even(counts[start:stop], 2)
    return start + halves[0]


def _kept(search: _AutoSearch) -> Choice:
    """Return what learns no worse, of the choices that are as good as the best, and else what keeps threads least busy.

    A plan that hides a long exchange behind the backward pass is the worse one as soon as that pass is shorter.
    """
    limit = ALIKE * search.found[search.best()].step
    alike = {c: search.found[c] for c in search.final or search.found if search.found[c].step <= limit}
    plain = [choice for choice in alike if len(choice.plain) == len(choice.counts)]
    kept = min(plain, key=lambda c: alike[c].step) if plain else min(alike, key=lambda c: _busy(alike[c]))
    return replace(kept, why=_why(search, kept))


def _busy(measured: Measured) -> float:
    """Return the seconds that the exchange and the decoding thread work, in as many steps as were measured."""
    return sum(bucket.exchange + bucket.decode for bucket in measured.buckets)


def _why(search: _AutoSearch, kept: Choice) -> str:
    """Return what a step took under the choice, and under the best of each kind that was measured as often."""
    among = search.final or list(search.found)
    kinds = {
        "all compressed": [c for c in among if not c.plain],
        "some compressed": [c for c in among if 0 < len(c.plain) < len(c.counts)],
        "none compressed": [c for c in among if len(c.plain) == len(c.counts)],
    }
    least = {name: min(search.found[c].step for c in choices) for name, choices in kinds.items() if choices}
    told = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in least.items())
    taken = 1e3 * search.found[kept].step
    return f"Its step took {taken:.1f} ms from first gradient to last result; the best times were {told}"
