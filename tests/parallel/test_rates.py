"""Residuals that follow the learning rate, in real processes."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks


@pytest.mark.slow
def test_both_paths_and_a_resume_give_the_same_bits() -> None:
    for report in run_ranks(2, "rates.py", timeout=60).values():
        for case in (report["follows"], report["goes on"]):
            assert case["stock"] == case["attached"] == case["resumed"]
            assert set(case["ranks"]) == {case["stock"]}
            assert len({case["stock"], case["left"], case["forgotten"]}) == 3  # the controls
