"""The examples' tasks with the model on a device that all ranks share: payloads are staged through host memory."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F

import horovod_compress.torch as hvc
from tests.support.accelerator import everything_on_accelerator
from tests.support.jobs import ROOT
from tests.support.rank import arguments, check

sys.path.insert(0, str(ROOT / "examples"))
import tasks

STEPS = 6
METHODS = ("none", "marsit", "topk", "sketch_fusion")
hvd.init()
torch.set_num_threads(1)
WHERE = torch.device(arguments()["device"])
if WHERE.type == "cuda":
    torch.cuda.set_device(0)  # ranks may share a GPU, where payloads do not go through NCCL


def digest(model: torch.nn.Module) -> str:
    from tests.support import training

    return training.digest([parameter.detach().cpu() for parameter in model.parameters()])


def run(task: Any, method: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = task.model().to(WHERE)
    named = list(model.named_parameters())
    compression = hvc.Compression.create(method, named, verify_every=1, transport="gloo")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    compression.attach(optimizer)
    digests, losses = [digest(model)], []
    for step in range(STEPS):
        inputs, targets = (part.to(WHERE) for part in task.batch(0, step, hvd.rank(), hvd.size(), 4))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        digests.append(digest(model))
        losses.append(float(loss))
    reducer = compression._reducer
    assert reducer
    found = {
        "digests": digests,
        "finite": all(loss == loss for loss in losses),
        "stats": {name: compression.stats()[name] for name in ("verified", "nonfinite", "bytes_sent")},
        "devices": sorted({kept.device.type for state in reducer.kept.states().values() for kept in state.values()}),
        "staged": all(where.is_accelerator for where in reducer.context.devices.values()),
    }
    compression.close()
    return found


with everything_on_accelerator() if WHERE.type == "cpu" else contextlib.nullcontext():
    for name in ("digits", "text"):
        task = tasks.TASKS[name]()
        for method in METHODS:
            check(f"{name} {method}", lambda: run(task, method))
