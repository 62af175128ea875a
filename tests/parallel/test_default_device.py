"""What a rank needs on its host is made there, whatever ``torch.set_default_device()`` says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.jobs import needs_front, run_ranks


@pytest.mark.parametrize(("front", "plain"), [("horovod", False), ("torch", True)])
def test_the_default_device_of_a_program_changes_nothing(front: str, plain: bool) -> None:
    needs_front(front)
    reports: list[dict[str, Any]] = run_ranks(
        2, "default_device.py", timeout=120.0, front=front, arguments={"plain": plain}
    ).values()
    for method, (usual, elsewhere) in reports[0].items():
        assert usual == elsewhere and " " not in usual, method
    assert reports[0] == reports[1] and len(set(map(tuple, reports[0].values()))) == 4
