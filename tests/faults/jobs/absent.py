"""One rank ends before a meeting of all, by an error of its own; the others come to it and wait."""

from __future__ import annotations

import time

import horovod.torch as hvd
import torch

import horovod_compress.torch as hvc
from horovod_compress.fronts.horovod import job
from tests.support.rank import arguments, report

case = arguments()
hvd.init()
model = torch.nn.Linear(2, 2)


def end_before(meeting: str) -> None:
    """Let the victim of this meeting end when the others have come to it."""
    if (hvd.rank(), meeting) != (case["victim"], case["meeting"]):
        return
    others = [f"hvc.{meeting}.0.{rank}" for rank in range(hvd.size()) if rank != hvd.rank()]
    while not all(job._call("GET", key) for key in others):
        time.sleep(0.05)
    raise RuntimeError("this rank's own error")


def train() -> None:
    """Take one step."""
    named = list(model.named_parameters())
    compression = hvc.Compression.none(named, timeout=case["timeout"])
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression)
    end_before("attach")
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


end_before("handshake")
began = time.monotonic()
try:
    train()
except hvc.ExchangeError as error:
    report({"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - began})
else:
    report({"error": None})
