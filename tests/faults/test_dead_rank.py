"""A rank is killed: every other rank fails at once, wherever in a step it happens."""

from __future__ import annotations

import pytest

from tests.support.marks import slow
from tests.support.nursery import Nursery

from .survivors import DDP, PATHS, PHASES, WORLD, check_survivors, strike

SECONDS = 5.0
FEW = [("mid-ring", 2, "attached"), ("idle", 0, "stock")]
OTHERS = [("in backward", 1, "attached"), ("idle", 3, "attached")]
ALL = [*OTHERS, *((phase, victim, path) for phase in PHASES for victim in (0, 2) for path in (*PATHS, DDP))]


@pytest.mark.parametrize("path", ["attached", *slow("stock", DDP)])
def test_control(nursery: Nursery, path: str) -> None:
    for rank in nursery.run(WORLD, "train.py", {"fault": "none", "path": path}):
        assert rank.report["first"]["error"] is None, rank.report
        assert rank.report["steps"] == 4
        tokens = rank.report["tokens"]  # their owners: see test_tokens_at_horovod_s_end
        assert min(tokens) > 1 if path == "stock" else not tokens
        assert (rank.status, rank.output) == (0, "")


@pytest.mark.parametrize(("phase", "victim", "path"), [*FEW, *slow(*(case for case in ALL if case not in FEW))])
def test_killed(nursery: Nursery, phase: str, victim: int, path: str) -> None:
    check_survivors(strike(nursery, "kill", phase, victim, path), victim, path, 0.0, SECONDS)


@pytest.mark.parametrize("child", ["fork", *slow("system")])
def test_killed_beside_its_children(nursery: Nursery, child: str) -> None:
    """Such as the workers of a data loader, which live on with copies of what it had open."""
    survivors = strike(nursery, "kill", "idle", 1, DDP, child=child, timeout=4 * SECONDS)
    check_survivors(survivors, 1, DDP, 0.0, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "victim", "method"),
    [("encode", 2, "marsit"), ("decode", 1, "sparse_binary"), ("encode", 3, "sketch_fusion")],
)
def test_killed_in_update_mode(nursery: Nursery, phase: str, victim: int, method: str) -> None:
    """The weights are set back to those that all ranks have in common."""
    survivors = strike(nursery, "kill", phase, victim, "update", method=method, exchange="auto")
    check_survivors(survivors, victim, "update", 0.0, SECONDS)
    assert len({rank.report["left"] for rank in survivors}) == 1
    for rank in survivors:
        assert rank.report["left"] == rank.report["last"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["attached", DDP])
def test_killed_in_fold(nursery: Nursery, path: str) -> None:
    survivors = strike(nursery, "kill", "encode", 1, path, exchange="fold")
    check_survivors(survivors, 1, path, 0.0, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "path"), [(0, "attached"), (2, "attached"), (2, DDP)])
def test_killed_in_the_transport_s_own_sum(nursery: Nursery, victim: int, path: str) -> None:
    survivors = strike(nursery, "kill", "sum", victim, path, method="none", exchange="auto", width=8192)
    check_survivors(survivors, victim, path, 0.0, SECONDS)
