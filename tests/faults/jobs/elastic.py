"""An elastic job in which one of three ranks is killed; what the others do with the compression that they have."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc

case: dict[str, Any] = json.loads(os.environ["HVC_TEST_ARGUMENTS"])
folder = Path(os.environ["HVC_TEST_FOLDER"])
STEPS, FAULT = 8, 3


def build() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 4)
    named = list(model.named_parameters())
    compression = hvc.Compression.none(named, timeout=5.0, schedule="layerwise")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    if case["path"] == "update":
        return model, hvc.DistributedUpdateOptimizer(plain, named, compression)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression)
    return model, compression.attach(optimizer) if case["path"] == "attached" else optimizer


def step(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


@hvd.elastic.run
def train(state: Any) -> None:
    with (folder / f"tries.{os.getpid()}").open("a") as tries:
        tries.write(f"{hvd.size()}\n")
    model, optimizer = build() if case["anew"] else kept
    while state.batch < STEPS:
        if state.batch == FAULT and os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1" and hvd.local_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer)
        state.batch += 1
        state.commit()


hvd.init()
kept = (torch.nn.Linear(1, 1), None) if case["anew"] else build()
train(hvd.elastic.TorchState(model=kept[0], batch=0))
(folder / f"done.{os.getpid()}").touch()
