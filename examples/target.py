"""When runs reach the same result: a loss that all of them reach, and what each needs for it."""

from __future__ import annotations

import math
from typing import Any

Record = dict[str, Any]


def target(records: list[Record]) -> float:
    """Return the lowest held-out loss at which every run ends or has been: the highest of their last ones.

    A run whose loss is not a number at the end does not count.
    """
    return max((_last(record) for record in records if math.isfinite(_last(record))), default=math.inf)


def needed(record: Record, loss: float, what: str) -> float | None:
    """Return after how many steps, seconds or bytes the held-out loss stays at or below this one.

    Linear between two evaluations. A loss that is reached and lost again does not count, so
    that one lucky evaluation decides nothing. None if the run does not end there.

    Args:
        what: "step", "seconds" or "bytes_sent", as the points of the curve have it.
    """
    points = record["curve"]
    above = [number for number, point in enumerate(points) if _loss(point) > loss]
    if not above:
        return 0.0
    if above[-1] == len(points) - 1:
        return None
    high, low = points[above[-1]], points[above[-1] + 1]
    # An infinite loss has no share of the way; the next evaluation is known to be there.
    share = (_loss(high) - loss) / (_loss(high) - _loss(low)) if math.isfinite(_loss(high)) else 1.0
    return float(high[what] + share * (low[what] - high[what]))


def times_better(records: list[Record], what: str) -> list[float | None]:
    """Return how many times less than the first run each needs to the common target."""
    found = [needed(record, target(records), what) for record in records]
    return [found[0] / mine if found[0] and mine else None for mine in found]


def axis(records: list[Record]) -> str:
    """Return what runs are compared by: seconds where their link was slow, else bytes."""
    return "seconds" if all(rate(record) for record in records) else "bytes_sent"


def rate(record: Record) -> float | None:
    """Return the rate of the run's links in bits per second; None if there was no limit."""
    bits: float | None = record.get("place", {}).get("rate_bits")
    return bits


def _last(record: Record) -> float:
    return _loss(record["curve"][-1])


def _loss(point: Record) -> float:
    return math.inf if point["loss"] is None else float(point["loss"])
