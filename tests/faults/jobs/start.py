"""One rank stops, or sleeps, between the handshake and the connections; then all try again."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from horovod_compress.fronts import startup
from tests.support.rank import arguments, report
from tests.support.training import digest

case = arguments()
hvd.init()
connect = startup._connect_all


def harmed(*given: Any) -> Any:
    """Come to harm once, where the case says so."""
    startup._connect_all = connect
    if hvd.rank() == case["victim"] and case["fault"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if hvd.rank() == case["victim"] and case["fault"] == "sleep":
        time.sleep(case["sleep"])
    return connect(*given)


startup._connect_all = harmed
torch.manual_seed(3)
model, errors, began = torch.nn.Linear(20, 20), [], time.monotonic()
weights = None
for _ in range(case["tries"]):
    try:
        compression = hvc.Compression.none(model.named_parameters(), timeout=case["timeout"])
    except hvc.HorovodCompressError as error:
        errors.append([type(error).__name__, time.monotonic() - began, str(error)])
        report({"errors": errors, "weights": None})
        continue
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), compression=compression)
    model(torch.full((1, 20), 1.0 + hvd.rank())).square().sum().backward()
    optimizer.step()
    weights = digest(model.parameters())
    compression.close()
    break
report({"errors": errors, "weights": weights})
if case["fault"] == "stop":
    os._exit(0)  # Horovod would wait for the rank that is stopped
