"""A rank freezes: every other rank fails when the time is over, not before and not much later."""

from __future__ import annotations

import pytest

from tests.support.nursery import Nursery

from .survivors import DDP, PATHS, PHASES, TIMEOUT, check_survivors, strike

pytestmark = pytest.mark.slow

#: The other ranks' clocks run from the beginning of the bucket, a little before the fault.
EARLIEST, LATEST = TIMEOUT - 1.0, TIMEOUT + 2.0
CASES = [(phase, victim, path) for phase in PHASES for victim in (0, 2) for path in (*PATHS, DDP)]


@pytest.mark.parametrize(("phase", "victim", "path"), [*CASES, ("between", 1, "stock")])
def test_frozen(nursery: Nursery, phase: str, victim: int, path: str) -> None:
    check_survivors(strike(nursery, "stop", phase, victim, path), victim, path, EARLIEST, LATEST)


@pytest.mark.parametrize("path", ["attached", DDP])
def test_frozen_in_the_transport_s_own_sum(nursery: Nursery, path: str) -> None:
    survivors = strike(nursery, "stop", "sum", 2, path, method="none", exchange="auto", width=8192)
    check_survivors(survivors, 2, path, EARLIEST, LATEST)
