"""What adaptive schedules and the job that tries their buckets say to each other.

An adaptive schedule is a generator: it yields the buckets that it wants tried, is sent what was measured, and
returns the buckets to keep. It runs on rank 0 only, so it may look at clocks; the other ranks follow.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from .costs import Arrivals

#: How many consecutive tensors each bucket holds.
Groups = list[int]


@dataclass(frozen=True)
class BucketCost:
    """Seconds of one bucket: a median over steps, without waiting for slower ranks where that can be told."""

    elements: int
    exchange: float
    decode: float


@dataclass(frozen=True)
class Measured:
    """What some steps with one choice of buckets took.

    Attributes:
        step: seconds from the first gradient of a step to the first of the next one, on rank 0.
        arrivals: when gradients were there after the first one, on rank 0.
        buckets: in plan order.
    """

    step: float
    arrivals: Arrivals
    buckets: Sequence[BucketCost]


Tuning = Generator[Groups, Measured, Groups]
