"""Timelines of a real job with a backward pass that takes its time: with many buckets, and with one."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import horovod_compress.torch as hvc
from tests.support.rank import arguments, check
from tests.support.training import digest, optimizer_for, train

hvd.init()
torch.set_num_threads(1)
LAYERS, STEPS, SLEEP_SECONDS = 4, 7, 0.02


class Slow(torch.autograd.Function):
    """The identity, with a backward pass that takes its time and no processor, as one on an accelerator does."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        time.sleep(SLEEP_SECONDS)
        return grad


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(300, 300, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(Slow.apply(x)).tanh()
        return x


def loss_of(model: nn.Module, step: int) -> Tensor:
    torch.manual_seed(10 * step + hvd.rank())
    return model(torch.randn(4, 300)).square().mean()


def run(schedule: str, attach: bool, trace: bool, prefix: str) -> dict[str, Any]:
    model = Model()
    optimizer, compression = optimizer_for(model, "marsit", attach, prefix=prefix, schedule=schedule)
    assert compression is not None
    train(model, optimizer, range(2), loss_of)
    recorded = hvc.trace(f"{arguments()['folder']}/{schedule}.{attach}.json", steps=STEPS - 3) if trace else None
    train(model, optimizer, range(2, STEPS), loss_of)
    if recorded:
        recorded.close()
    stats = compression.stats()
    compression.close()
    shown = {name: stats[name] for name in ("overlap", "overlap_seconds", "buckets")}
    return shown | {"path": str(recorded.path) if recorded else "", "digest": digest(model.parameters())}


for schedule in ("layerwise", "single"):
    for attach in (True, False):
        check(f"{schedule} {attach}", lambda: run(schedule, attach, True, f"{schedule}.{attach}."))
check("untraced", lambda: run("layerwise", True, False, "untraced."))


def refused() -> str:
    try:
        hvc.trace("/proc/nowhere/t.json")
    except hvc.ConfigError as error:
        return str(error)
    return "accepted"


check("refused", refused)
