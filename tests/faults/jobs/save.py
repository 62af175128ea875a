"""Save twice; in the second save one rank comes to harm."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from horovod_compress.engine.saved import state_folder
from tests.support.rank import arguments, mark, report

case = arguments()
hvd.init()
torch.manual_seed(1)
model = torch.nn.Linear(64, 64)
compression = hvc.Compression.topk(model.named_parameters(), timeout=case["timeout"])
plain = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=compression)


def step() -> None:
    optimizer.zero_grad()
    model(torch.full((4, 64), 1.0 + hvd.rank())).square().mean().backward()
    optimizer.step()


def harm() -> None:
    mark("fault", repr(time.monotonic()))
    if case["fault"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case["fault"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case["fault"] == "raise":
        raise RuntimeError("this rank's own error")


def arm(name: str, before: bool) -> None:
    """Let harm come before or after one of the steps of a save."""
    whole = getattr(state_folder, name)

    def harmed(*given: Any, **options: Any) -> Any:
        if before:
            harm()
        found = whole(*given, **options)
        if not before:
            harm()
        return found

    setattr(state_folder, name, harmed)


step()
compression.save(case["folder"])
step()
if hvd.rank() == case["victim"] and case["fault"] != "none":
    arm(case["where"], case["before"])
error, text = None, ""
try:
    compression.save(case["folder"])
except Exception as found:
    error, text = type(found).__name__, str(found)
report({"error": error, "text": text, "at": time.monotonic()})
os._exit(0)
