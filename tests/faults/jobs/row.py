"""Of two ranks that have the two shards of one replica, one does not say whether its values are finite."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from horovod_compress.errors import ExchangeError
from horovod_compress.fronts.fsdp.grid import Column

SECONDS = 1.0


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1]]), mesh_dim_names=("replicate", "shard"))
    column = Column(mesh["replicate"], mesh["shard"])
    assert column.agree(None, 60.0) is None  # the control
    if rank:
        time.sleep(10 * SECONDS)
    else:
        begin = time.monotonic()
        try:
            column.agree(None, SECONDS)
        except ExchangeError as error:
            print(f"{time.monotonic() - begin:.1f} s: {error}", flush=True)
    os._exit(0)  # torch's group waits for its connections at the end


main(int(sys.argv[1]), sys.argv[2])
