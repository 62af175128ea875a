"""Embeddings with sparse gradients, on every rank or on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.front import DDP, hvc, start, trained
from tests.support.nets import digest
from tests.support.rank import check, rank

start()
torch.set_num_threads(1)


class Net(nn.Module):
    """An embedding and a layer; names differ, as Horovod knows gradients by theirs.

    Args:
        used: whether this rank's batch of a step has words.
    """

    def __init__(self, name: str, sparse: bool, used: Callable[[int], bool] = lambda step: True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._name, self._used = name, used
        self.add_module(name, nn.Embedding(50, 8, sparse=sparse))
        self.last = nn.Linear(8, 300)

    def forward(self, step: int) -> Tensor:
        words = torch.randint(50, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank()))
        found = getattr(self, self._name)(words).mean(1) if self._used(step) else torch.ones(4, 8)
        return self.last(found).square().mean()


def train(model: Net, way: str = "", steps: int = 3) -> str:
    compression = hvc.Compression.topk(model.named_parameters(), timeout=20.0, min_elements=1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "tokens":
        import horovod.torch as hvd

        named = list(model.named_parameters())
        called, optimizer = model, hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    else:
        called, optimizer = trained(model, optimizer, compression, plain=way == "plain")
    try:
        for step in range(steps):
            optimizer.zero_grad()
            called(step).backward()
            optimizer.step()
    except (hvc.MismatchError, hvc.ExchangeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        compression.close()
    return digest(model.parameters())


ways = ("plain", "") if DDP else ("", "tokens")
for way in ways:
    check(f"all {way}", lambda way=way: train(Net(f"all_{way}", sparse=True), way))  # type: ignore[misc]
    check(f"one {way}", lambda way=way: train(Net(f"one_{way}", sparse=rank() == 1), way))  # type: ignore[misc]
if not DDP:
    check("unused", lambda: train(Net("unused", True, lambda step: step != 1 or rank() == 0)))
