"""What adaptive schedules and the job that tries their buckets say to each other.

An adaptive schedule is a generator: it yields the buckets that it wants tried, is sent what was measured, and
returns the buckets to keep. It runs on rank 0 only, so it may look at clocks; the other ranks follow.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from .costs import Arrivals


@dataclass(frozen=True)
class Job:
    """What a schedule chooses for.

    Attributes:
        count: tensors, in the order in which their gradients arrive.
        argument: what stands behind the schedule's name, as 4 in ``"mergecomp:4"``.
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
