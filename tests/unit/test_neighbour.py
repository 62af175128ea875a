"""What a rank of an elastic job writes down for the one that holds its copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("horovod.torch")

from horovod_compress.fronts.horovod.neighbour import Neighbour


class OnDevice(Tensor):
    """Stands for one in a GPU's memory, and counts how often it is moved to the host."""

    moves = 0

    def cpu(self, *given: Any, **options: Any) -> Tensor:
        OnDevice.moves += 1
        return self.as_subclass(Tensor)


def test_what_waits_is_moved_to_the_host_once() -> None:
    residual = torch.arange(5.0).as_subclass(OnDevice)
    assert Neighbour().prepare({"state": {"residual": {"a": residual}}}) > residual.nbytes
    assert OnDevice.moves == 1
