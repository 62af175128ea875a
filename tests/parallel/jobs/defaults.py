"""Every method with its defaults: a small regression by SGD, at two rates, with and without momentum."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import mse_loss

import horovod_compress.torch as hvc
from horovod_compress.codecs import registry
from horovod_compress.errors import ConfigError
from tests.support.rank import report

hvd.init()
torch.set_num_threads(1)
SETTINGS = list(itertools.product((0.05, 0.01), (0.0, 0.9)))  # learning rate and momentum
STEPS, BATCH, WIDTH = 100, 16, 128


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(32, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
    )


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1024, 32, generator=generator)
    hidden = torch.tanh(x @ torch.randn(32, 8, generator=generator) / 4)
    return x, hidden @ torch.randn(8, 1, generator=generator) / 2


class Warnings(logging.Handler):
    """Takes note of what users are told about learning rates."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told = False

    def emit(self, record: logging.LogRecord) -> None:
        self.told = self.told or "may be far too high" in record.getMessage()


WARNINGS = Warnings()
logging.getLogger("horovod_compress").addHandler(WARNINGS)


def train(method: str, rate: float, momentum: float) -> float | str:
    """Return the loss on all data at the end, or why the method refuses."""
    model, (x, y) = net(), data()
    WARNINGS.told = False
    compression = hvc.Compression.create(method, model.named_parameters(), schedule="size:25MB")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    try:
        compression.attach(optimizer)
        for _ in range(STEPS):
            chosen = torch.randint(len(x), (BATCH,), generator=generator)
            optimizer.zero_grad()
            mse_loss(model(x[chosen]), y[chosen]).backward()
            optimizer.step()
    except ConfigError as error:
        return str(error)
    finally:
        compression.close()
    with torch.no_grad():
        return float(mse_loss(model(x), y))


def all_methods() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rate, momentum in SETTINGS:
        ended = {name: (train(name, rate, momentum), WARNINGS.told) for name in registry.methods()}
        found[f"{rate:g} {momentum:g}"] = ended
    with torch.no_grad():
        x, y = data()
        found["start"] = float(mse_loss(net()(x), y))
    return found


report(all_methods())
