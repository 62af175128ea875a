"""Real jobs with the model on a device: processes that share it, or have one each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.jobs import needs_front, run_ranks
from tests.support.marks import needs_sklearn

pytestmark = needs_sklearn

METHODS = ("none", "marsit", "topk", "sketch_fusion")
SECONDS = 280.0

gpu, slow = pytest.mark.gpu, pytest.mark.slow
# The CPU as a device is in test_staged.py by default, with smaller models.
PLACES = [
    pytest.param(("horovod", 4, "staged", "gloo"), marks=slow),
    pytest.param(("torch", 2, "staged", "gloo"), marks=slow),
    *(pytest.param((front, world, "cuda:0", "gloo"), marks=gpu) for front in ("horovod", "torch") for world in (2, 4)),
    *(pytest.param((front, 0, "cuda", "nccl"), marks=gpu) for front in ("horovod", "torch")),
]


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: " ".join(map(str, place)))
def found(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """Return the reports; over NCCL there is a rank for each GPU."""
    front, world, device, transport = request.param
    needs_front(front)
    world = world or torch.cuda.device_count()
    if transport == "nccl" and world < 2:
        pytest.skip("one GPU: ranks that share it cannot use NCCL; test_nccl.py has a communicator of one rank")
    given = {"device": device, "transport": transport}
    return device, run_ranks(world, "device.py", timeout=SECONDS, arguments=given, front=front).values()


@pytest.mark.parametrize("task", ["digits", "text"])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_on_a_device_stay_together(found: tuple[str, list[dict[str, Any]]], task: str, method: str) -> None:
    device, reports = found
    first = reports[0][f"{task} {method}"]
    for report in reports:
        mine = report[f"{task} {method}"]
        assert mine["digests"] == first["digests"] and mine["finite"] and mine["staged"]
        assert mine["stats"]["verified"] == len(set(mine["digests"])) - 1 == 6
        assert mine["stats"]["nonfinite"] == 0 and mine["stats"]["bytes_sent"] > 0
        assert set(mine["devices"]) <= {"cuda" if device.startswith("cuda") else "cpu"}
