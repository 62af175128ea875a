"""Times whole steps with and without the norm of the exact mean, by turns; runs on every rank.

    sudo python -m benchmarks.lab --ranks 4 --rate 1gbit --limit 1200 -- -m benchmarks.jobs.match_norm

`marsit` without exact rounds, AdamW, and a backward pass that only hands over gradients made beforehand. A step with
the norm is compared with one without it right after it; the slowest rank counts. In the long run, one step in ten
measures the norm: here more do, and each kind has a median of its own.
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
from torch import nn

import horovod_compress.torch as hvc
from benchmarks.jobs.allreduce import Handed
from benchmarks.jobs.rank import run_job, say, slowest, tell

TENSORS = 25
EVERY = 10  # one step in so many measures the norm, in the long run
FIRST = 110  # steps before any are timed: results are handed over at once by then


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
        self.norm = 0.0  # as measured last

    def step(self) -> float:
        """Take a step together with the other ranks; return this rank's seconds."""
        self.optimizer.zero_grad()
        models = [SimpleNamespace(gradient=fresh.clone()) for fresh in self.fresh]
        hvd.barrier()
        began = time.perf_counter()
        pairs = zip(self.parameters, models, strict=True)
        torch.stack([Handed.apply(*pair) for pair in pairs]).sum().backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return time.perf_counter() - began

    def has_measured(self) -> bool:
        """Return whether the last step has measured the norm."""
        before, self.norm = self.norm, self.compression.stats()["gradient_norm"]
        return before != self.norm


def measure(chosen: argparse.Namespace) -> int:
    sides = matching, plain = [Side(chosen.elements, match_norm=match) for match in (True, False)]
    for number in range(FIRST):
        for side in sides:
            side.step()
        if (number + 1) % EVERY == 0:
            say(f"{number + 1} of {FIRST} steps before any are timed")
    matching.has_measured()
    seconds: dict[Side, list[float]] = {matching: [], plain: []}
    kinds = []
    for number in range(chosen.repeat):
        for side in sides[:: 1 if number % 2 else -1]:
            seconds[side].append(side.step())
        kinds.append(matching.has_measured())
        if (number + 1) % EVERY == 0:
            say(f"{number + 1} of {chosen.repeat} pairs of steps")
    if not 0 < sum(kinds) < len(kinds):
        raise ValueError(f"{sum(kinds)} of {len(kinds)} steps have measured the norm; take more pairs (--repeat)")
    pairs = list(zip(*(slowest(seconds[side], f"bench.{number}") for number, side in enumerate(sides)), strict=True))
    more = {
        kind: statistics.median(a - b for (a, b), of in zip(pairs, kinds, strict=True) if of == kind)
        for kind in (True, False)
    }
    without = statistics.median(b for _, b in pairs)
    share = (more[True] + (EVERY - 1) * more[False]) / EVERY / without
    tell(
        {
            "bench": "match_norm", "elements": chosen.elements, "pairs": chosen.repeat, "measured": sum(kinds),
            "share": share, "seconds_without": without, "more_measuring": more[True], "more_else": more[False],
        }
    )  # fmt: skip
    say(f"with the norm, steps of {without * 1e3:.0f} ms take {share:.1%} longer in the long run")
    for side in sides:
        side.compression.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--repeat", type=int, default=100, help="pairs of steps (default 100)")
    chosen = parser.parse_args()
    return run_job(lambda: measure(chosen))


if __name__ == "__main__":
    sys.exit(main())
