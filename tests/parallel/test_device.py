"""Real jobs with the model on a device: four processes that share it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")
pytest.importorskip("sklearn")

from tests.support.jobs import run_ranks

WORLD = 4
METHODS = ("none", "marsit", "topk", "sketch_fusion")


# The CPU as a device is in test_staged.py by default, with smaller models.
@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda:0", marks=pytest.mark.gpu)]
)
def found(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """Return the reports; on the CPU payloads are staged as if it were another device."""
    job = run_ranks(WORLD, "device.py", timeout=300, arguments={"device": request.param})
    return request.param, job.values()


@pytest.mark.parametrize("task", ["digits", "text"])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_share_a_device_stay_together(
    found: tuple[str, list[dict[str, Any]]], task: str, method: str
) -> None:
    device, reports = found
    first = reports[0][f"{task} {method}"]
    for report in reports:
        mine = report[f"{task} {method}"]
        assert mine["digests"] == first["digests"] and mine["finite"] and mine["staged"]
        assert mine["stats"]["verified"] == len(set(mine["digests"])) - 1 == 6
        assert mine["stats"]["nonfinite"] == 0 and mine["stats"]["bytes_sent"] > 0
        assert set(mine["devices"]) <= {device.partition(":")[0]}
