"""Plain numbers go through the transport's own all-reduce, and come out as through the ring."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks, values_of

WORLD = 3
COUNT = 100_003
TOLERANCES = {"float32": 1e-6, "float64": 1e-15, "float16": 2e-3, "ring": 1e-6, "full precision round": 1e-6}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(WORLD, "native.py", timeout=120).reports


@pytest.mark.parametrize("name", TOLERANCES)
def test_the_mean_of_all_ranks_equal_on_every_rank(found, name: str) -> None:
    for value in values_of(found, name):
        exact = value["off"][:1] if name == "full precision round" else value["off"]
        assert max(exact) < TOLERANCES[name]
        for digests in value["digests"]:
            assert len(set(digests)) == 1


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("float32", "native"),
        ("float64", "native"),
        ("float16", "fold"),  # 400 kB on 3 ranks: a ring would have two hops more
        ("ring", "ring"),
        ("full precision round", "native"),
    ],
)
def test_which_collective_is_taken(found, name: str, collective: str) -> None:
    for value in values_of(found, name):
        assert value["collectives"] == [collective]


def test_one_infinite_value_spoils_the_step_on_every_rank_and_no_later_one(found) -> None:
    for value in values_of(found, "spoiled"):
        assert value["finite"] == [[0, 0], [COUNT, COUNT]]
        assert value["off"][1] < 1e-6


def test_bytes_are_those_of_a_ring(found) -> None:
    for native, ring in zip(values_of(found, "float32"), values_of(found, "ring"), strict=True):
        assert native["bytes"] == pytest.approx(ring["bytes"], rel=0.01)
