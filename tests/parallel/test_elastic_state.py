"""What an elastic state does with its compression while ranks stay: commits, syncs and restores.

:mod:`tests.faults.test_elastic` has the changes of ranks.
"""

from __future__ import annotations

import pytest

from tests.support.jobs import run_ranks

pytest.importorskip("horovod.torch")


def test_alone() -> None:
    """One rank: a restore in the middle of a step, a compression that no state has, and the memory of a commit."""
    (found,) = run_ranks(1, "elastic_state.py").values()
    assert found["restored_in_a_step"] == 0.0
    assert "belongs into an hvd.elastic.TorchState" in found["given_to_no_state"]
    assert found["peak_of_a_commit"] < 0.25, "a commit has more than one copy at a time"


def test_together() -> None:
    """Two ranks: a commit saves no local steps from the end of the program; a scaler is as on rank 0."""
    ranks = run_ranks(2, "elastic_state.py").values()
    for found in ranks:
        unfinished, committed, saved = found["local_steps"]
        assert unfinished and committed == unfinished and saved is None
        synced, moved, restored = found["scalers"]
        assert synced["scale"] == 2.0**10 and synced["growth_interval"] == 7 and moved["scale"] == 8.0
        assert restored == synced
