"""Trainings whose counters are published: what came to the files, the writer and the log."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.rank import folder, rank, report
from tests.support.training import batch, net

DDP = "HOROVOD_RANK" not in os.environ

if DDP:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import horovod_compress.ddp as hvc

    dist.init_process_group("gloo")
else:
    import horovod.torch as hvd

    import horovod_compress.torch as hvc  # type: ignore[no-redef]

    hvd.init()
torch.set_num_threads(1)


class Lines(logging.Handler):
    """Keeps what is logged of the first steps."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "steps: " in record.getMessage() and "times fewer bytes" in record.getMessage():
            self.found.append(record.getMessage())


class Writer:
    """Takes scalars as a SummaryWriter does."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, []).append((step, value))


def of_gradients(model: nn.Module, compression: Any, kind: Any = torch.optim.SGD) -> tuple[Any, nn.Module]:
    plain = kind(model.parameters(), lr=0.01)
    if DDP:
        called = DistributedDataParallel(model)
        compression.register(called, plain)
        return plain, called
    named = list(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression)
    return compression.attach(optimizer), model


def of_updates(model: nn.Module, compression: Any) -> tuple[Any, nn.Module]:
    plain, named = torch.optim.SGD(model.parameters(), lr=0.01), list(model.named_parameters())
    return hvc.DistributedUpdateOptimizer(plain, named, compression, 2), model


def train(
    make: Any, steps: int, name: str, every: int = 50, method: str = "global_qsgd", **options: Any
) -> dict[str, Any]:
    lines, writer, model = Lines(), Writer(), net(seed=1)
    logging.getLogger("horovod_compress").addHandler(lines)
    options |= {"schedule": "layerwise", "timeout": 60.0}
    compression = hvc.Compression.create(method, model.named_parameters(), **options)
    compression.publish(prometheus=folder() / f"{name}.prom", every=every, labels={"job_name": name})
    compression.publish(tensorboard=writer if rank() == 0 else None, every=every)
    optimizer, called = make(model, compression)
    for step in range(steps):
        optimizer.zero_grad()
        called(batch(step, rank())).square().mean().backward()
        optimizer.step()
    stats, shown = compression.stats(), repr(compression)
    compression.close()
    logging.getLogger("horovod_compress").removeHandler(lines)
    files = {path.name: path.read_text() for path in Path(folder()).glob(f"{name}.rank{rank()}.*")}
    return {"files": files, "lines": lines.found, "scalars": writer.scalars, "stats": stats, "shown": shown}


logging.getLogger("horovod_compress").setLevel(logging.INFO)
adam = partial(of_gradients, kind=torch.optim.AdamW)
found = {
    "gradients": train(of_gradients, 121, "gradients"),
    "short": train(adam, 40, "short", method="marsit", total_steps=40, levels=2),
}
if not DDP:
    found["updates"] = train(of_updates, 41, "updates", every=10)
report(found)
if DDP:
    dist.destroy_process_group()
