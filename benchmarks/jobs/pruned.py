"""Trains pruned networks with and without masked(), on links as slow as the lab makes them; runs on every rank.

    sudo python -m benchmarks.lab --ranks 4 --rate 100mbit -- -m benchmarks.jobs.pruned --methods none,marsit

Weights are pruned by size after some steps, in every tensor but vectors, and momentum is emptied there. The control
multiplies the weights by the mask after each step and sends zeros. Rank 0 tells, for each: bytes that it sends in a
step and milliseconds of a step once pruned, seconds from there to the accuracy asked for, and what comes at the end.
"""

from __future__ import annotations

import argparse
import json
import runpy
import statistics
import sys
import time
from typing import Any

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import horovod_compress.torch as hvc
from benchmarks.outcomes import ROOT

sys.path.insert(0, str(ROOT / "examples"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.jobs.pruned", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="none,marsit")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prune-at", type=int, default=60)
    parser.add_argument("--left", type=float, default=0.2, help="share of the weights that is left")
    parser.add_argument("--target", type=float, default=0.94, help="accuracy on held-out images")
    return parser.parse_args()


@torch.no_grad()
def prune(model: nn.Module, optimizer: Any, left: float) -> dict[str, Tensor]:
    """Let the smallest weights be 0, and return what is left, by name."""
    masks = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            least = parameter.abs().flatten().kthvalue(int((1 - left) * parameter.numel())).values
            masks[name] = mask = parameter.abs() > least
            parameter.mul_(mask)
            optimizer.state[parameter]["momentum_buffer"].mul_(mask)
    return masks


@torch.no_grad()
def accuracy(model: nn.Module, task: Any) -> tuple[float, float]:
    images, labels = task.test
    scores = model(images)
    return float((scores.argmax(dim=1) == labels).double().mean()), float(F.cross_entropy(scores, labels))


def train(task: Any, method: Any, masked: bool, chosen: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    model = task.model()
    named = list(model.named_parameters())
    compression = hvc.Compression.create(hvc.masked(method) if masked else method, named)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named, compression=compression)
    compression.attach(optimizer)
    masks: dict[str, Tensor] = {}
    times, reached, sent, seconds = [], None, 0, 0.0
    for step in range(chosen.steps):
        if step == chosen.prune_at:
            masks, sent = prune(model, optimizer, chosen.left), compression.stats()["bytes_sent"]
        images, labels = task.batch(0, step, hvd.rank(), hvd.size(), 32)
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in named if not masked else ():
                if name in masks:
                    parameter.mul_(masks[name])
        times.append(time.perf_counter() - began)
        if masks:
            seconds += times[-1]
            if reached is None and step % 5 == 4 and accuracy(model, task)[0] >= chosen.target:
                reached = seconds
    after = chosen.steps - chosen.prune_at
    compression_sent = compression.stats()["bytes_sent"] - sent
    zeros = sum(int((p == 0).sum()) for n, p in named if n in masks) / sum(p.numel() for _, p in named)
    compression.close()
    found = accuracy(model, task)
    return {
        "method": method,
        "masked": masked,
        "bytes_per_step": round(compression_sent / after),
        "ms_per_step": round(1000 * statistics.median(times[chosen.prune_at + 5 :]), 2),
        "seconds_to_target": reached and round(reached, 2),
        "accuracy": round(found[0], 4),
        "loss": round(found[1], 4),
        "zeros": round(zeros, 4),
    }


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    tasks = runpy.run_path(str(ROOT / "examples" / "tasks.py"))
    task, chosen = tasks["Digits"](), arguments()
    for method in chosen.methods.split(","):
        for masked in (False, True):
            found = train(task, method, masked, chosen)
            if hvd.rank() == 0:
                print(json.dumps(found), flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
