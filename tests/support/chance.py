"""How far what is drawn may be from what is expected."""

from __future__ import annotations

from statistics import NormalDist

_FALSE_ALARM = 1e-6  # of a whole test; the seeds are fixed, so it either always passes or never


def z(tests: int) -> float:
    """Return the two-sided bound on a normal variable for that many tests together (Bonferroni)."""
    return NormalDist().inv_cdf(1 - _FALSE_ALARM / (2 * tests))
