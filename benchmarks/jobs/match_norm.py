"""Times whole steps with and without the norm of the exact mean, in turns; runs on every rank.

    sudo python -m benchmarks.lab --ranks 4 --rate 1gbit --limit 1200 -- -m benchmarks.jobs.match_norm

`marsit` without exact rounds, AdamW, and a backward pass that only hands over gradients made beforehand. It begins
after so many steps that one in ten measures the norm. A turn is ten steps, and the slowest rank counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import horovod_compress.torch as hvc
from benchmarks.jobs.allreduce import Handed
from benchmarks.jobs.rank import run_job, say, slowest, tell

TENSORS = 25
STEPS = 10  # of a turn
FIRST = 250  # steps before any are timed


class Side:
    """A model with its optimizer."""

    def __init__(self, elements: int, *, match_norm: bool) -> None:
        torch.manual_seed(hvd.rank())
        self.parameters = [nn.Parameter(torch.zeros(elements // TENSORS)) for _ in range(TENSORS)]
        self.fresh = [torch.randn_like(parameter) for parameter in self.parameters]
        named = [(str(number), parameter) for number, parameter in enumerate(self.parameters)]
        options: dict[str, Any] = {"schedule": "size:8MB", "verify_every": 0, "full_precision_every": 0}
        self.compression = hvc.Compression.marsit(named, **options)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(self.parameters, lr=1e-5), named_parameters=named, compression=self.compression
        )
        self.compression.attach(self.optimizer, match_norm=match_norm)
        self.seconds: list[float] = []

    def steps(self, number: int, grads: list[Tensor]) -> None:
        for _ in range(number):
            self.optimizer.zero_grad()
            for grad, fresh in zip(grads, self.fresh, strict=True):
                grad.copy_(fresh)
            models = [SimpleNamespace(gradient=grad) for grad in grads]
            pairs = zip(self.parameters, models, strict=True)
            torch.stack([Handed.apply(*pair) for pair in pairs]).sum().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def turn(self, grads: list[Tensor]) -> None:
        hvd.barrier()
        began = time.perf_counter()
        self.steps(STEPS, grads)
        self.seconds.append((time.perf_counter() - began) / STEPS)


def measure(chosen: argparse.Namespace) -> int:
    sides = {name: Side(chosen.elements, match_norm=name == "with") for name in ("with", "without")}
    grads = [torch.empty_like(parameter) for parameter in sides["with"].parameters]
    for name, side in sides.items():
        say(f"{FIRST} steps {name} the norm")
        side.steps(FIRST, grads)
    for number in range(chosen.repeat):
        say(f"turn {number + 1} of {chosen.repeat}")
        for side in [*sides.values()][:: 1 if number % 2 else -1]:
            side.turn(grads)
    found = {name: slowest(side.seconds, f"bench.{name}") for name, side in sides.items()}
    ratio = statistics.median(a / b for a, b in zip(found["with"], found["without"], strict=True))
    medians = {f"median_seconds_{name}": statistics.median(seconds) for name, seconds in found.items()}
    tell({"bench": "match_norm", "elements": chosen.elements, "turns": chosen.repeat, "ratio": ratio} | medians)
    say(f"a step with the norm takes {ratio:.3f} times as long")
    for side in sides.values():
        side.compression.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--repeat", type=int, default=10, help="turns (default 10)")
    chosen = parser.parse_args()
    return run_job(lambda: measure(chosen))


if __name__ == "__main__":
    sys.exit(main())
