"""The cases of the benchmark of kernels: what each runs, beside what, and what it should give."""

from __future__ import annotations

from .arrays import Arrays
from .case import Case
from .dense import dense
from .lowrank import low_rank
from .memory import checksums, yardsticks
from .optimizers import adam, sgd
from .quantised import dithering, quantising
from .signs import bit_vectors, one_bit, records
from .sketches import sketches
from .sparse import sparse, unions, values

__all__ = ["Arrays", "Case", "by_others", "cases"]

FAMILIES = (
    yardsticks, one_bit, bit_vectors, dithering, quantising, sparse, unions, values, dense, sketches, low_rank, records,
    checksums, adam, sgd,
)  # fmt: skip


def cases(a: Arrays, pattern: str) -> list[Case]:
    every = [case for family in FAMILIES for case in family(a)]
    return [case for case in every if pattern in case.name or case.name == "triad"]


def by_others(name: str) -> bool:
    """Return whether a case is not a kernel of this project."""
    return any(word in name for word in ("torch", "numpy"))
