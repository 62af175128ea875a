"""Jobs that no launcher ends: each process ends by itself, soon, with an error that names the rank that failed.

``horovodrun`` kills all ranks when one has ended, which hides a process that would never end by itself. Here nobody
does, as under launchers that start ranks one by one.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.marks import slow
from tests.support.nursery import Nursery, Rank

from .survivors import aborted_by_horovod, blames

WORLD = 3
#: Seconds that an exchange waits for a silent rank, and Horovod's own Gloo: so much longer that this package shuts
#: Horovod down meanwhile.
TIMEOUT, LIMIT = 1.0, 4
#: Beyond Horovod's limit: a second for the notes, another for the ends of processes, and much for a machine that is
#: busy with other work. What fails here would last without end.
SLACK, BOUND = 45.0, 90.0
FAULTS = ["stop", *slow("sleep", "kill", "raise", "term")]


def run(nursery: Nursery, fault: str, **more: Any) -> tuple[list[Rank], list[Rank]]:
    """Run a program that lets errors end it; return all ranks and the survivors of a fault of rank 1."""
    case = {"fault": fault, "victim": 1, "catch": False, "timeout": TIMEOUT, "sleep": 15.0} | more
    victims = [1] if fault in ("stop", "kill", "term") else []
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(LIMIT)}
    ranks = nursery.run(WORLD, "train.py", case, victims=victims, bound=BOUND, env=env)
    return ranks, [rank for rank in ranks if rank.number != 1]


def check_ends(ranks: list[Rank], survivors: list[Rank]) -> None:
    """Check that each survivor has ended by itself, in time, by an error that names rank 1."""
    at = float(ranks[1].marks["fault"])
    told = [rank for rank in survivors if not aborted_by_horovod(rank)]
    assert told, "Horovod has aborted every rank"
    for rank in told:
        assert rank.status == 1, f"rank {rank.number}: {rank.status} {rank.output}"
        assert rank.at - at <= LIMIT + SLACK, f"rank {rank.number} ended {rank.at - at:.1f} s after the fault"
        last = rank.output[rank.output.rindex("horovod_compress.errors.ExchangeError") :]
        assert blames(last, 1) or "Rank 1 stopped first" in last, last


@pytest.mark.parametrize("fault", FAULTS)
def test_every_survivor_ends_and_says_why(nursery: Nursery, fault: str) -> None:
    """On the stock path the training thread waits in Horovod, and what ends that wait must end once only."""
    check_ends(*run(nursery, fault, path="stock"))


@pytest.mark.parametrize(
    ("path", "fault"), slow(*((p, f) for p in ("attached", "update", "ddp") for f in ("stop", "kill")))
)
def test_on_other_paths(nursery: Nursery, path: str, fault: str) -> None:
    check_ends(*run(nursery, fault, path=path))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("attached", "kill"),
        ("attached", "stop"),
        ("stock", "kill"),
        ("stock", "stop"),
        ("ddp", "kill"),
        ("ddp", "stop"),
    ],
)
def test_in_the_search_of_a_schedule(nursery: Nursery, path: str, fault: str) -> None:
    """Where ranks compare times, a gather of Horovod's fails, which knows no ranks."""
    check_ends(*run(nursery, fault, path=path, schedule="mergecomp", step=3, steps=12))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["stock", "attached", "update", "ddp"])
def test_control(nursery: Nursery, path: str) -> None:
    """Without a fault every rank ends well, and says nothing."""
    schedule = "layerwise" if path == "update" else "mergecomp"
    ranks, _ = run(nursery, "none", path=path, schedule=schedule, steps=12)
    for rank in ranks:
        assert (rank.status, rank.output) == (0, ""), rank
