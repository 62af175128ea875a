"""Sparse gradients, parameters that no rank uses, and static graphs with several buckets, under DDP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import run_ranks


@pytest.fixture(scope="module")
def reports() -> list[dict[str, Any]]:
    return run_ranks(2, "ddp_left_out.py", timeout=200.0, front="torch").reports


@pytest.mark.parametrize("way", ["as ever", "static graph", "alone"])
def test_sparse_gradients_are_reduced_by_torch_uncompressed(way: str, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        found = report["sparse"][way]
        assert found["none"] < 1e-6 and found["moved"] > 1e-3
        # The control: the dense layer beside it is compressed, where there is one.
        assert found["compressed"] < 1e-6 if way == "alone" else found["compressed"] > 1e-3


@pytest.mark.parametrize("static", ["False", "True"])
def test_several_buckets_of_a_static_graph(static: str, reports: list[dict[str, Any]]) -> None:
    """In its first step DDP numbers them all 0, and says of none that it is the last one."""
    assert all(report["two types"][static] < 1e-6 for report in reports)


def test_what_waits_for_parameters_that_no_rank_uses_stays(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report["left out"]) == 11
        # Nobody uses a parameter whose gradient torch.autograd.grad() has returned.
        for name, found in {**report["left out"], "looked at": report["looked at"]}.items():
            nobody, some = found["right"], found["left"]
            assert nobody["waited"] and nobody["kept"] and nobody["weights"] and nobody["others"], name
            # The control: where another rank uses them, they are exchanged, and what waits is sent.
            assert some["waited"] and not some["kept"] and not some["weights"], name
            assert nobody["verified"] == some["verified"] == 7, name
