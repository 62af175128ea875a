"""MergeComp: buckets found by measuring steps, without a model of method or network (arXiv:2103.15195).

    y = 1: one bucket. For y = 2, 3, ... up to max_groups: search the place of one more cut, where the time of a
    step as a function of that place is taken to fall and then rise; stop when the gain is below alpha

What we changed: the paper tries every combination of the y - 2 cuts before; here they stay where they were found,
so that a search takes tens of steps and not thousands. A step is timed from its first gradient to its last result.
Compressor state is carried over from trial to trial, where the paper's code clears it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import pairwise
from typing import Any

from ...errors import ConfigError
from ..trial import Choice, Job, Measured, Tuning

MAX_GROUPS = 4
ALPHA = 0.03  # a gain below this share, of the time from first gradient to last result, is not worth another bucket
_CELLS = 12  # a cut is placed to about 1/12 of the tensors between its neighbours

Trying = Generator[Choice, Measured, float]


def tune(job: Job) -> Tuning:
    """Search the buckets of a job; see :mod:`..trial`. All of them are compressed."""
    most, count = check(job.argument), job.count
    seconds: dict[tuple[int, ...], float] = {}

    def time_of(cuts: tuple[int, ...]) -> Trying:
        if cuts not in seconds:
            measured = yield Choice(sizes(cuts, count))
            seconds[cuts] = measured.step
        return seconds[cuts]

    best: tuple[int, ...] = ()
    yield from time_of(best)
    for _ in range(1, min(most, count)):
        cuts = yield from _one_more(best, count, time_of)
        if seconds[cuts] > (1 - ALPHA) * seconds[best]:
            break
        best = cuts
    return Choice(sizes(min(seconds, key=lambda cuts: seconds[cuts]), count))


def check(argument: str) -> int:
    """Refuse an argument that is no number, and return the most buckets of ``"mergecomp:4"``.

    Raises:
        ConfigError: the argument is no number of at least 1.
    """
    if argument and not (argument.isdecimal() and int(argument) >= 1):
        raise ConfigError(f'schedule="mergecomp:N" takes a number of buckets, got {argument!r}')
    return int(argument or MAX_GROUPS)


def sizes(cuts: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return how many tensors lie between cuts."""
    ends = [0, *cuts, count]
    return tuple(stop - start for start, stop in pairwise(ends))


def _one_more(cuts: tuple[int, ...], count: int, time_of: Callable[[tuple[int, ...]], Trying]) -> Any:
    """Search the best place of one more cut, between the two neighbours that are farthest apart."""
    ends = [0, *cuts, count]
    low, high = max(pairwise(ends), key=lambda pair: pair[1] - pair[0])
    least, most = low + 1, high - 1
    step = max(1, (high - low) // _CELLS)
    while most - least > step:
        middle = (least + most) // 2
        left = yield from time_of(_with(cuts, middle))
        right = yield from time_of(_with(cuts, min(most, middle + step)))
        if left <= right:
            most = middle
        else:
            least = middle + 1
    yield from time_of(_with(cuts, least))
    return _with(cuts, least)


def _with(cuts: tuple[int, ...], cut: int) -> tuple[int, ...]:
    return tuple(sorted({*cuts, cut}))
