"""What update mode asks of a compression, on a rank that takes no part."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("horovod.torch")

import torch

from horovod_compress.fronts.horovod.compression import Compression
from horovod_compress.fronts.horovod.updates import distributed_update_optimizer


class Outside:
    """A job in whose process set this rank is not."""

    def included(self) -> bool:
        return False


def test_a_rank_outside_the_process_set_trains_by_itself() -> None:
    job: Any = Outside()
    compression = Compression("topk", [], {}, job)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert compression._for_updates() is None
    assert distributed_update_optimizer(optimizer, [], compression) is optimizer
    compression.close()
