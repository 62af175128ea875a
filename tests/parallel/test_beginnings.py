"""Parameters that are trained later than others learn from compressed gradients as from exact ones."""

from __future__ import annotations

import pytest

from tests.support.jobs import checks_of, needs_front
from tests.support.marks import slow

LATER = ("frozen", "cleared")
FOUND = {front: checks_of("beginnings.py", LATER, timeout=200.0, front=front) for front in ("torch", "horovod")}


@pytest.mark.parametrize(
    ("front", "case"), [("torch", "added"), *slow(*((front, case) for front in FOUND for case in LATER))]
)
def test_it_ends_near_where_no_compression_does(front: str, case: str) -> None:
    """With one compressed gradient held as their second moment, losses are 2.5 to 4.4 times as large."""
    needs_front(front)
    first, other = FOUND[front](case)
    assert first == other
    assert first["marsit"] < 1.35 * first["none"]
