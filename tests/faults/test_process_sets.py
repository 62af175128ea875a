"""A compression of other ranks than its optimizer's is refused at once: some ranks would wait for others in vain."""

from __future__ import annotations

import pytest

from tests.support.marks import slow
from tests.support.nursery import Nursery

TIMEOUT = 30.0
INSIDE = {"some": {0, 1}, "all": {0, 1, 2}}


@pytest.mark.parametrize(("compression", "optimizer"), [("all", "some"), *slow(("some", "all"))])
def test_other_ranks_are_refused(nursery: Nursery, compression: str, optimizer: str) -> None:
    case = {"compression": compression, "optimizer": optimizer, "timeout": TIMEOUT}
    ranks = nursery.run(3, "sets.py", case)
    for rank in ranks:
        if rank.number not in INSIDE[optimizer]:  # it trains by itself
            assert rank.report == {"error": None}
            continue
        assert rank.report["error"] == "ConfigError", rank
        assert rank.report["seconds"] < TIMEOUT / 3
        both = "give both the same process_set=" in rank.report["text"]
        assert both or rank.number not in INSIDE[compression], rank.report


@pytest.mark.slow
@pytest.mark.parametrize("both", ["all", "some"])
def test_control(nursery: Nursery, both: str) -> None:
    for rank in nursery.run(3, "sets.py", {"compression": both, "optimizer": both, "timeout": TIMEOUT}):
        assert (rank.status, rank.report) == (0, {"error": None}), rank
