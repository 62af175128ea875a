"""DistributedDataParallel in groups that met without torchrun: nothing in the environment tells where the ranks are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT
from tests.support.launch import free_port
from tests.support.marks import slow

WORLD = 2
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist
import horovod_compress.ddp as hvc
rank, init, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2)
model = torch.nn.Linear(3, 2)
called = torch.nn.parallel.DistributedDataParallel(model)
compression = hvc.Compression.marsit(model.named_parameters(), timeout=60.0)
compression.register(called)
called(torch.ones(1, 3) + rank).sum().backward()
compression.save(folder)
print(compression.stats()["steps"], flush=True)
os._exit(0)  # rank 0 may host the store
"""
TOLD_BY_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.mark.slow
@pytest.mark.parametrize("init", [*slow("file://{folder}/store"), "tcp://localhost:{port}"])
def test_ranks_of_one_host_find_each_other_and_may_end_after_a_save(init: str, tmp_path: Path) -> None:
    method, saved = init.format(folder=tmp_path, port=free_port()), tmp_path / "saved"
    environment = {name: value for name, value in os.environ.items() if name not in TOLD_BY_LAUNCHERS}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, str(rank), method, str(saved)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        found = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [said for said, _ in found] == ["1\n"] * WORLD, found
