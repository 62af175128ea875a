"""What an elastic state does with its compression while ranks stay: commits, syncs and restores.

:mod:`tests.faults.test_elastic` has the changes of ranks.
"""

from __future__ import annotations

import pytest

from tests.support.jobs import run_ranks

pytest.importorskip("horovod.torch")


def test_alone() -> None:
    """One rank: nothing is compressed; restores in the middle of a step, commits that fail, and what they take."""
    (found,) = run_ranks(1, "elastic_state.py").values()
    assert found["restored_in_a_step"] == 0.0
    assert found["like_torch_alone"] == [], "gradients of one rank were compressed"
    assert "belongs into an hvd.elastic.TorchState" in found["given_to_no_state"]
    shown, told, step = found["failed_commits"]
    assert shown is None and step == 0
    assert "rank 0: the job goes back to its last commit, of which this rank should have a copy, and has none" in told
    assert found["peak_of_a_commit"] < 0.25, "a commit has more than one copy at a time"


def test_together() -> None:
    """Two ranks: neither a commit nor a new state saves local steps; a scaler, or one that joins, is as on rank 0."""
    ranks = run_ranks(2, "elastic_state.py").values()
    for found in ranks:
        unfinished, *kept, saved = found["local_steps"]
        assert unfinished and kept == [unfinished, unfinished] and saved is None
        synced, moved, restored = found["scalers"]
        assert synced["scale"] == 2.0**10 and synced["growth_interval"] == 7 and moved["scale"] == 8.0
        assert synced.pop("followed") == synced["scale"], "residuals stand for the scale of before"
        assert restored == synced
        assert found["follows_later"] == [2.0**10, 2.0**10]
        assert found["joins_behind_an_unused_exchange"][0], "weights were moved by a step without gradients"
    first, second = (found["joins_behind_an_unused_exchange"] for found in ranks)
    assert first == second
    first, second = (found["joined"] for found in ranks)
    assert first[0] == second[0] == second[2] != second[1]
