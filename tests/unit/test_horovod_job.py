"""Whether a rank takes part, by what Horovod says of its process sets."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch")

import horovod.torch as hvd
from horovod.common import process_sets

from horovod_compress.fronts.horovod.job import HorovodJob


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of a job whose Horovod has begun."""
    monkeypatch.setattr(hvd, "is_initialized", lambda: True)
    monkeypatch.setattr(process_sets._basics, "rank", lambda: 0)
    monkeypatch.setattr(hvd.global_process_set, "ranks", [])


def test_every_rank_is_in_the_whole_job(first: None) -> None:
    """Horovod's set has no ranks where another rank ends meanwhile: this one would train alone, and say nothing."""
    assert not hvd.global_process_set.included()
    assert HorovodJob(hvd.global_process_set).included()


@pytest.mark.parametrize("ranks", [[0, 2], [1, 2]])
def test_in_a_process_set_are_its_ranks(first: None, ranks: list[int]) -> None:
    some = hvd.ProcessSet(ranks)
    some.process_set_id = 1
    assert HorovodJob(some).included() == (0 in ranks)
