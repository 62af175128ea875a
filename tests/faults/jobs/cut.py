"""Train in the lab; one rank's host loses its link in the middle."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp
import horovod_compress.torch as hvc
from benchmarks.lab.network import INTERFACE
from benchmarks.outcomes import emit
from benchmarks.peers.ddp import join

case = json.loads(sys.argv[1])
hvd.init()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 64, bias=False))
called, optimizer = model, torch.optim.SGD(model.parameters(), lr=0.01)
options = {"timeout": case["timeout"]}
if case["front"] == "torch":
    join()  # the ranks of torch.distributed meet where Horovod's do
    called = DistributedDataParallel(model)
    compression = horovod_compress.ddp.Compression.create(case["method"], model.named_parameters(), **options)
    compression.register(called, optimizer)
else:
    compression = hvc.Compression.create(case["method"], model.named_parameters(), **options)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    compression.attach(optimizer)
found = {"rank": hvd.rank(), "error": None, "text": "", "steps": 0, "seconds": 0.0}
began = time.monotonic()
try:
    for step in range(case["steps"]):
        if step == case["step"]:
            began = time.monotonic()
            if hvd.rank() == case["victim"]:
                subprocess.run(["ip", "link", "set", "dev", INTERFACE, "down"], check=True)
        optimizer.zero_grad()
        x = torch.randn(8, 64)
        (called(x) - x).square().mean().backward()
        optimizer.step()
        found["steps"] = step + 1
except hvc.HorovodCompressError as error:
    found |= {"error": type(error).__name__, "text": str(error)}
emit(found | {"seconds": time.monotonic() - began})
sys.stdout.flush()
os._exit(0)  # without a link, Horovod's own shutdown waits for it
