"""Results are not written into memory that autograd still needs in the pass under way."""

from __future__ import annotations

import pytest

from tests.support.jobs import needs_front, run_ranks


@pytest.mark.parametrize("front", ["horovod", "torch"])
def test_gradients_are_the_means_of_what_autograd_makes(front: str) -> None:
    needs_front(front)
    first, other = run_ranks(2, "shared_gradients.py", timeout=120.0, front=front).values()
    assert len(first) == (4 if front == "horovod" else 6)
    assert not {name: far for found in (first, other) for name, far in found.items() if far > 1e-5}
