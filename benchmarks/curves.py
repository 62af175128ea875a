"""What a training curve says: when a result was reached, and which result is a fair target.

A curve is a list of points with `seconds` of training and `value`, the held-out metric. A single
evaluation can be lucky, so values are smoothed: each is the mean of itself and the two before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

Curve = Sequence[dict[str, float | None]]
SMOOTHED_OVER = 3
BASELINE_PART = 2 / 3


def better(one: float, other: float, metric: str) -> bool:
    """Return whether a value is at least as good as another: higher accuracy, lower loss."""
    return one >= other if metric == "accuracy" else one <= other


def smoothed(curve: Curve) -> list[tuple[float, float]]:
    """Return (seconds, mean of this and the two values before); points without a number are left out."""
    found = []
    for last in range(SMOOTHED_OVER - 1, len(curve)):
        values = [point["value"] for point in curve[last - SMOOTHED_OVER + 1 : last + 1]]
        if (seconds := curve[last]["seconds"]) is not None and None not in values:
            found.append((seconds, mean(value for value in values if value is not None)))
    return found


def seconds_to(curve: Curve, target: float, metric: str) -> float | None:
    """Return the seconds at which the smoothed value first is as good as the target; None if never."""
    return next((seconds for seconds, value in smoothed(curve) if better(value, target, metric)), None)


def best(curve: Curve, metric: str) -> float | None:
    """Return the best smoothed value."""
    values = [value for _, value in smoothed(curve)]
    return (max(values) if metric == "accuracy" else min(values)) if values else None


def worst(values: Sequence[float], metric: str) -> float:
    return min(values) if metric == "accuracy" else max(values)


def automatic_target(baseline: Sequence[Curve], others: Sequence[Curve], metric: str) -> tuple[float, str]:
    """Return a target that every run reaches, and the rule in words.

    It is what every seed of the baseline has reached after two thirds of its evaluations. Should
    some run never come that far, it is the best value that all runs reach, which is the worst
    choice for the slowest method: it gets there at its very end.

    Raises:
        ValueError: a run has too few evaluations with a number.
    """
    early = [best(curve[: max(SMOOTHED_OVER, round(BASELINE_PART * len(curve)))], metric) for curve in baseline]
    reached = [best(curve, metric) for curve in [*baseline, *others]]
    if None in early or None in reached:
        raise ValueError(f"a target needs at least {SMOOTHED_OVER} finite evaluations of every run")
    target = worst([value for value in early if value is not None], metric)
    common = worst([value for value in reached if value is not None], metric)
    if better(common, target, metric):
        return target, "what every seed of the baseline has reached after 2/3 of its steps"
    return common, "the best that all runs reach (the baseline has more after 2/3 of its steps)"


def median_line(curves: Sequence[Curve]) -> list[tuple[float, float]]:
    """Return the medians over curves of seconds and smoothed value, at every evaluation that all of them have."""
    evaluations = zip(*(smoothed(curve) for curve in curves), strict=False)
    return [(median(seconds for seconds, _ in found), median(value for _, value in found)) for found in evaluations]
