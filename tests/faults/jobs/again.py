"""Ranks whose step fails in the middle of backward passes that have come to different layers, and that begin again."""

from __future__ import annotations

import time
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import horovod_compress.torch as hvc
from tests.support.rank import report

LAYERS = 4
#: Seconds of each layer's backward pass, by rank, and of what rank 1 sends first, which is corrupt.
BACKWARD, SENDS = (0.3, 1.2), 0.45

hvd.init()


class Spoiling:
    """A transport that is late with its first frame, and flips a bit in its second."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._sent = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, data: Tensor, to: int) -> Any:
        self._sent += 1
        if self._sent == 1:
            time.sleep(SENDS)
        if self._sent == 2:
            data = data.clone()
            data[-1] ^= 16
        return self._inner.send(data, to)


def attempt(fails: bool) -> str | None:
    """Train two steps with a new model; return the kind of the error, if one came."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(LAYERS)))
    compression = hvc.Compression.marsit(model.named_parameters(), schedule="layerwise", exchange="ring", timeout=20.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters(), compression=compression
    )
    if fails:
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: time.sleep(BACKWARD[hvd.rank()]))
        if hvd.rank() == 1:
            context = compression._here().reducer.context
            context.transport = Spoiling(context.transport)  # type: ignore[assignment]
    try:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        compression.close()
    return None


report([attempt(fails) for fails in (True, False, False)])
