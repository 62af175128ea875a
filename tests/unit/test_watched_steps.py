"""What Horovod's optimizers are watched for at each step, among the ranks that are there then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("horovod.torch")

from horovod_compress.errors import ConfigError
from horovod_compress.fronts.horovod.gradients import watch_steps

TOLD = "has a gradient that is never reduced"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_job_that_begins_with_one_rank_is_watched_as_soon_as_there_are_more(
    rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    parameter, ranks = nn.Parameter(torch.ones(3)), SimpleNamespace(world=1, rank=0)
    optimizer: Any = torch.optim.SGD([parameter], lr=0.1)
    vars(optimizer).update(_handles={}, _requires_update=set(), _should_synchronize=True)
    watch_steps(optimizer, lambda: ranks, {id(parameter): "frozen"})
    parameter.grad = torch.ones(3)
    optimizer.step(lambda: None)  # with one rank it is as without Horovod
    assert TOLD not in caplog.text
    ranks.world, ranks.rank = 2, rank
    for _ in range(2):
        optimizer.step()
    assert caplog.text.count(TOLD) == (rank == 0)
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: None)
