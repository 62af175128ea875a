"""One rank saves while another one steps: with one compression, with two, or at the first step."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from horovod_compress.engine import patience
from horovod_compress.errors import HorovodCompressError
from tests.support.rank import arguments, report

case = arguments()
if case["path"] == "ddp":
    import torch.distributed as dist

    import horovod_compress.ddp as front

    dist.init_process_group("gloo")
    rank = dist.get_rank()
else:
    import horovod.torch as hvd

    import horovod_compress.torch as front  # type: ignore[no-redef]

    hvd.init()
    rank = hvd.rank()
patience._SHARE, patience._APART_SECONDS = 1 / 60, case["apart"]


def made() -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    compression = front.Compression.topk(model.named_parameters(), schedule="single")
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if case["path"] == "ddp":
        compression.register(model, optimizer)  # type: ignore[attr-defined]
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
        compression.attach(optimizer)  # type: ignore[attr-defined]
    return model, compression, optimizer


def step(model: Any, compression: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.full((4, 8), 1.0 + rank)).square().mean().backward()
    optimizer.step()


first, second = made(), made()
if case["kind"] != "first step":
    for _ in range(3):
        step(*first)
        step(*second)
error, text, began = None, "", time.monotonic()
try:
    if rank == 0 and case["kind"] == "late":
        time.sleep(3 * case["apart"])
    if rank == 0 or case["kind"] == "late":
        first[1].save(case["folder"])
    else:
        step(*(second if case["kind"] == "other compression" else first))
except HorovodCompressError as found:
    error, text = type(found).__name__, str(found)
report({"error": error, "text": text, "seconds": time.monotonic() - began})
if error:
    sys.exit(1)
