"""What can be seen of a model that ``fully_shard`` divides with one rank, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import horovod_compress.fsdp as hvc
from horovod_compress.engine.agreement import differences
from horovod_compress.errors import MismatchError
from horovod_compress.fronts import compression as fronts


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DeviceMesh("cpu", torch.zeros(1, 1, dtype=torch.int64), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def test_a_compression_that_failed_to_register_is_not_open(
    mesh: DeviceMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timeline looks at all that are, and so does the end of the process; it may be registered again."""
    net = nn.Linear(4, 3)
    fully_shard(net, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compression = hvc.Compression.topk(net.named_parameters(), replicate=mesh["replicate"])
    with monkeypatch.context() as patch, pytest.raises(MismatchError, match="density differs"):
        patch.setattr(differences, "difference", lambda shown: "density differs between ranks")
        compression.register(net, optimizer)
    assert compression not in fronts._open
    hvc.trace(str(tmp_path / "trace.json")).close()
    compression.register(net, optimizer)
    net(torch.ones(2, 4)).sum().backward()
    assert compression in fronts._open and compression.stats()["steps"] == 1
    compression.close()
