"""One rank of benchmarks.engine_overhead: the time of steps with many tiny tensors, by processor time of all threads.

It uses nothing but the public names of the package and of torch, so that it runs with any checkout of the package: that
in PYTHONPATH. Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Step = Callable[[], object]


class Tiny(nn.Module):
    """Many parameters, and hardly any work."""

    def __init__(self, count: int, elements: int) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.ones(elements)) for _ in range(count)])

    def forward(self) -> Tensor:
        return torch.cat(list(self.all)).sum()


def options_of(method: str, schedule: str) -> dict[str, Any]:
    """Return the options of one measurement: every step is of one kind."""
    own = {"full_precision_every": 0} if method == "marsit" else {}
    return {"schedule": schedule, "verify_every": 0, **own}


def horovod_steps(asked: dict[str, Any]) -> tuple[dict[str, Step], Step]:
    """Return what is measured under Horovod, with one rank: gradients through compress() and decompress() alone."""
    import horovod.torch as hvd

    import horovod_compress.torch as hvc

    hvd.init()
    closing = []

    def step_of(schedule: str) -> Step:
        model = Tiny(asked["params"], asked["elements"])
        grads = [torch.ones_like(parameter) for parameter in model.parameters()]
        for parameter, grad in zip(model.parameters(), grads, strict=True):
            parameter.grad = grad
        own = options_of(asked["method"], schedule)
        compression = hvc.Compression.create(asked["method"], model.named_parameters(), **own)
        closing.append(compression.close)

        def step() -> None:
            tokens = [compression.compress(grad) for grad in grads]
            for token, context in tokens:
                compression.decompress(token, context)

        return step

    steps: dict[str, Step] = {"base": lambda: None}
    steps |= {schedule: step_of(schedule) for schedule in ("single", "layerwise")}
    return steps, lambda: [close() for close in closing]


def torch_steps(asked: dict[str, Any]) -> tuple[dict[str, Step], Step]:
    """Return what is measured under DistributedDataParallel; the base is a hook that exchanges nothing."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import horovod_compress.ddp as hvc

    dist.init_process_group("gloo")
    closing: list[Callable[[], object]] = []

    def idle(state, bucket):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202  torch checks annotations
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def step_of(schedule: str) -> Step:
        model = Tiny(asked["params"], asked["elements"])
        called, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.0)
        if schedule == "base":
            called.register_comm_hook(None, idle)
        else:
            own = options_of(asked["method"], schedule)
            compression = hvc.Compression.create(asked["method"], model.named_parameters(), **own)
            closing.append(compression.close)
            compression.register(called, optimizer)

        def step() -> None:
            called().backward()
            optimizer.step()

        return step

    steps = {name: step_of(name) for name in ("base", "single", "layerwise")}
    closing.append(dist.destroy_process_group)
    return steps, lambda: [close() for close in closing]


def measured(step: Step, times: int) -> tuple[float, float]:
    """Return the processor time of all threads of this process, and the time that passed, in microseconds a step."""
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - cpu) / times * 1e6, (time.perf_counter() - began) / times * 1e6


def main(asked: dict[str, Any]) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    steps, close = (horovod_steps if asked["front"] == "horovod" else torch_steps)(asked)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for step in steps.values():
        measured(step, asked["steps"])  # what is only done at first
    for _ in range(asked["blocks"]):
        for name, step in steps.items():
            found[name].append(measured(step, asked["steps"]))
    close()
    if os.environ["RANK"] == "0":
        print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
