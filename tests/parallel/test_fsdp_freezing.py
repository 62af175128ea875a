"""Frozen and unfrozen parameters of models that ``fully_shard`` divides, on real ranks: replicas stay equal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import run_ranks


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(4, "fsdp_freezing.py", timeout=120, front="torch").values()


@pytest.mark.parametrize("method", ["none", "topk"])
def test_what_torch_has_kept_of_a_layer_does_not_move_it_once_it_is_frozen(found, method: str) -> None:
    for report in found:
        assert report[method] == {"moved": [True] * 3 + [False] * 3, "drift": 0.0}


@pytest.mark.parametrize("how", ["as it is", "one row", "replaced", "registered in between", "frozen again"])
def test_a_layer_that_is_unfrozen_is_refused_before_it_moves_and_trained_by_another_compression(
    found, how: str
) -> None:
    """On all ranks alike, also where one has none of a parameter's rows."""
    for number, report in enumerate(found):
        told, drift = report[f"unfrozen, {how}"]
        assert told.startswith(f"2 ConfigError: rank {number}: an optimizer makes a step with gradients that are not")
        assert "0.weight, 0.bias" in told and "create and register another one" in told and "replica" not in told
        assert drift == "drift 0.0"


def test_a_layer_that_another_compression_exchanges_is_trained(found) -> None:
    assert [report["unfrozen elsewhere"] for report in found] == [0.0] * 4


def test_schedules_of_pipelines_are_refused(found) -> None:
    for report in found:
        control, told = report["pipelines"]
        assert control == "trained" and "comes outside of backward(), as schedules of torch" in told


def test_options_of_register_that_differ_between_shards_are_told_by_ranks_of_the_job(found) -> None:
    for report in found:
        told = report["options"]
        shown = "warmup_steps= of register() differs between ranks: ranks 0, 2 = '3', ranks 1, 3 = '4'; "
        assert told.startswith(f"MismatchError: {shown}") and "replica" not in told
