"""Staged payloads under stock Horovod, in real processes and over Gloo."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

from tests.support.jobs import run_ranks
from tests.support.samples import samples

WORLD = 4

pytestmark = pytest.mark.slow  # tests/battery/test_staged.py has the same in one process


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(WORLD, "staged.py", timeout=300).values()


@pytest.mark.parametrize("case", [sample.name for sample in samples()])
def test_staged_and_unstaged_ranks_hold_the_same_bits(found: list[dict[str, Any]], case: str) -> None:
    for report in found:
        plain, staged = report[case]["plain"], report[case]["staged"]
        assert plain == staged
        assert plain["weights"] == found[0][case]["plain"]["weights"] and plain["bytes"] > 0
        assert plain["verified"] == len(plain["weights"]) == len(set(plain["weights"]))
