"""Times local steps and their exchanges; runs on every rank, see benchmarks.local_steps.

The clock runs over whole cycles, from a barrier to the last local step: an exchange under way is ended before and
after. The slowest rank counts. Compute is a sleep, as in benchmarks.step.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvc
from benchmarks.jobs.rank import run_job, slowest, tell

TENSORS = 25


def made(asked: dict[str, Any], options: dict[str, Any]) -> tuple[Any, hvc.Compression]:
    """Return an optimizer in update mode, of parameters that have gradients, and its compression."""
    options = dict(options)
    torch.manual_seed(hvd.rank())
    parameters = {str(n): nn.Parameter(torch.zeros(int(asked["elements"]) // TENSORS)) for n in range(TENSORS)}
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    method = options.pop("method")
    compression = hvc.Compression.create(method, parameters.items(), schedule="size:8MB", verify_every=0)
    plain = torch.optim.SGD(parameters.values(), lr=1e-4)
    return hvc.DistributedUpdateOptimizer(plain, parameters.items(), compression, **options), compression


def measure(asked: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a local step with its share of the exchanges, and those that were waited for."""
    optimizer, compression = made(asked, options)
    cycle = options.get("communication_delay", 1)
    count = asked["steps"] if cycle > 100 else -(-asked["steps"] // cycle) * cycle  # that long ones never end is meant

    def steps(number: int) -> None:
        for _ in range(number):
            time.sleep(asked["compute_ms"] / 1e3)
            optimizer.step()

    steps(min(count, 2 * cycle))
    seconds = []
    for _ in range(asked["repeat"]):
        optimizer._updates.settle()
        hvd.barrier()
        began = time.perf_counter()
        steps(count)
        seconds.append((time.perf_counter() - began) / count)
    optimizer._updates.settle()
    sent = compression.stats()["bytes_sent"]
    compression.close()
    return {"seconds": slowest(seconds, "bench.seconds"), "bytes_sent": sent}


def main() -> int:
    asked = json.loads(sys.argv[1])
    for name, options in asked["cases"].items():
        tell({"bench": "local_steps", "name": name, "options": options} | measure(asked, options))
    return 0


if __name__ == "__main__":
    sys.exit(run_job(main))
