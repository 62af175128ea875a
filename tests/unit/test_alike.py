"""Ranks begin alike: what torch cannot broadcast is named. tests/parallel/test_plain.py has the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import Tensor

from horovod_compress.errors import ConfigError
from horovod_compress.fronts.torch_dist.alike import begin_alike

SESSION: Any = SimpleNamespace(
    gather=lambda mine, name, by_name: [mine, mine], job=SimpleNamespace(rank=0, number=0, size=2)
)


@pytest.fixture(autouse=True)
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "odd",
    [torch.eye(4).to_sparse(), torch.ones(2, 3, dtype=torch.int16).T, torch.ones(1).expand(4)],
    ids=["sparse", "transposed int16", "expanded"],
)
def test_what_torch_cannot_broadcast_is_named(odd: Tensor) -> None:
    usual = [("usual", torch.ones(3)), ("complex", torch.ones(3, dtype=torch.complex64)), ("flags", torch.ones(2) > 0)]
    usual += [("short", torch.ones(2, 3, dtype=torch.int16)), ("one", torch.ones((), dtype=torch.int16))]
    begin_alike(usual, SESSION, dist.group.WORLD)
    with pytest.raises(ConfigError, match="rank 0: torch cannot broadcast odd of the module given to register"):
        begin_alike([*usual, ("odd", odd)], SESSION, dist.group.WORLD)
