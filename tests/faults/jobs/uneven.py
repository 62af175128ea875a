"""Ranks call hvd.join(): after as many steps as the others, which is fine, and then before them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd

import horovod_compress.torch as hvc
from tests.support.rank import arguments, folder, report
from tests.support.training import batch, net


def tried(what: Callable[[], Any]) -> list[str | None]:
    try:
        what()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return [None, ""]


def main() -> None:
    import torch

    case = arguments()
    hvd.init()
    model = net()
    named = list(model.named_parameters())
    compression = hvc.Compression.none(named, timeout=60.0, schedule="layerwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if case["path"] == "update":
        optimizer = hvc.DistributedUpdateOptimizer(optimizer, named, compression)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    if case["path"] == "attached":
        compression.attach(optimizer)

    def train(steps: int) -> None:
        for step in range(steps):
            optimizer.zero_grad()
            model(batch(step, hvd.rank())).square().mean().backward()
            optimizer.step()

    def even() -> None:
        """Join twice; ranks that wait for one that is late after the first time are not to complain."""
        train(2)
        hvd.join()
        if hvd.rank() in case["joining"]:
            time.sleep(case["pause"])
        train(2)
        hvd.join()

    def join_early() -> None:
        train(case["before"] if hvd.rank() in case["joining"] else case["before"] + 2)
        hvd.join()

    found = {"even": tried(even)} if case["before"] else {}
    began = time.monotonic()
    found["uneven"] = tried(join_early)
    report(found | {"seconds": time.monotonic() - began, "steps": compression._session.reducer.metrics.steps})
    # Horovod ends with the first rank that does, so no rank leaves before those have reported that end by themselves.
    until = time.monotonic() + 30.0
    while any(not (folder() / f"report.{rank}").exists() for rank in case["await"]) and time.monotonic() < until:
        time.sleep(0.02)
    os._exit(0)


main()
