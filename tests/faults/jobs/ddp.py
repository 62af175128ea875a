"""DistributedDataParallel, or a plain module, with a rank that dies, freezes, or refuses in the middle of a step."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc
from tests.support.rank import arguments, mark, rank, report, say_pid
from tests.support.training import digest, net

case = arguments()
AT = 3  # the step in which it happens

dist.init_process_group("gloo")
say_pid()
model = net(seed=2)
ddp = {"bucket_cap_mb": 0.01} | case["ddp"]
called = model if ddp.pop("plain", False) else DistributedDataParallel(model, **ddp)
compression = hvc.Compression.marsit(model.named_parameters(), timeout=case["timeout"], schedule="layerwise")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
compression.register(called, optimizer)


def come_to_harm(grad: Tensor) -> Tensor:
    if step == AT and rank() == case["victim"]:
        if case["fault"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if case["fault"] == "stop":
            mark("stopped")
            os.kill(os.getpid(), signal.SIGSTOP)
        if case["fault"] == "raise":
            raise RuntimeError("an error of the model's own")
    return grad


model[3].weight.register_hook(come_to_harm)  # the buckets of the layers behind it are under way by then
found: dict[str, Any] = {"error": None}
began = time.monotonic()
step = 0
try:
    for step in range(8):
        began = time.monotonic()
        optimizer.zero_grad()
        inputs = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(10 * step + rank()))
        called(inputs).square().mean().backward()
        optimizer.step()
except Exception as error:
    found = {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began}
report(found | {"step": step, "weights": digest(model.parameters())})
if found["error"] is None:
    compression.close()
    dist.destroy_process_group()
