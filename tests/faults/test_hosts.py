"""A rank that shares its host is killed, or freezes: all others fail, those of its host and those of others."""

from __future__ import annotations

import pytest

from tests.support.marks import slow
from tests.support.nursery import Nursery

from .survivors import DDP, HOST_PHASES, TIMEOUT, WORLD, check_survivors, strike

SECONDS = 5.0
HOSTED = {"exchange": "hierarchical", "hosts": 2}
LAST = 1  # the bucket after which nothing is exchanged until the next step
ANYWHERE = ["in backward", "encode", "decode", "idle", *HOST_PHASES]


def test_control(nursery: Nursery) -> None:
    for rank in nursery.run(WORLD, "train.py", {"fault": "none", "path": "attached"} | HOSTED):
        assert rank.report["first"]["error"] is None, rank.report
        assert (rank.report["steps"], rank.status, rank.output) == (4, 0, "")


@pytest.mark.parametrize(
    ("phase", "victim", "path"),
    [
        ("host", 2, "attached"),
        *slow(
            ("deliver", 1, "attached"),
            *((phase, victim, "attached") for phase in ANYWHERE for victim in (0, 3)),
            ("agree", 2, DDP),
        ),
    ],
)
def test_killed(nursery: Nursery, phase: str, victim: int, path: str) -> None:
    survivors = strike(nursery, "kill", phase, victim, path, bucket=LAST, **HOSTED)
    check_survivors(survivors, victim, path, 0.0, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "victim"), [(phase, victim) for phase in ANYWHERE for victim in (0, 3)])
def test_frozen(nursery: Nursery, phase: str, victim: int) -> None:
    survivors = strike(nursery, "stop", phase, victim, "attached", bucket=LAST, **HOSTED)
    check_survivors(survivors, victim, "attached", TIMEOUT - 1.0, TIMEOUT + 2.0)
