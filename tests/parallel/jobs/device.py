"""The examples' tasks with the model on a device: one that all ranks share, where payloads go through host memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F

from tests.support.front import hvc, start, trained
from tests.support.jobs import ROOT
from tests.support.nets import digest
from tests.support.placing import count_ranks, place, staging
from tests.support.rank import arguments, check, rank

sys.path.insert(0, str(ROOT / "examples"))
import tasks

STEPS = 6
METHODS = ("none", "marsit", "topk", "sketch_fusion")
start()
torch.set_num_threads(1)
WHERE = place(arguments()["device"])
TRANSPORT = arguments().get("transport", "gloo")


def run(task: Any, method: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = task.model().to(WHERE)
    compression = hvc.Compression.create(method, model.named_parameters(), verify_every=1, transport=TRANSPORT)
    called, optimizer = trained(model, torch.optim.SGD(model.parameters(), lr=0.05), compression)
    digests, losses = [digest(model.parameters())], []
    for step in range(STEPS):
        inputs, targets = (part.to(WHERE) for part in task.batch(0, step, rank(), count_ranks(), 4))
        optimizer.zero_grad()
        loss = F.cross_entropy(called(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer.step()
        digests.append(digest(model.parameters()))
        losses.append(float(loss))
    reducer = compression._session.reducer
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


with staging(arguments()["device"]):
    for name in ("digits", "text"):
        task = tasks.TASKS[name]()
        for method in METHODS:
            check(f"{name} {method}", lambda: run(task, method))
