"""Horovod as it comes, and nothing at all in its place."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from .base import Adapter, Check, ring_bytes

_COMPRESSIONS = {"horovod fp32": hvd.Compression.none, "horovod fp16": hvd.Compression.fp16}


def adapter(name: str) -> Adapter:
    return Headroom() if name == "headroom" else Horovod(name)


class Counting:
    """One of Horovod's compressions that also counts what it is given.

    Horovod does not say how much it sends, so that is computed: what a ring sends from each rank.
    """

    def __init__(self, compression: Any) -> None:
        self._compression = compression
        self.payload = 0  # bytes

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        payload, context = self._compression.compress(tensor)
        self.payload += payload.numel() * payload.element_size()
        return payload, context

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        return self._compression.decompress(tensor, context)


class Horovod:
    """Stock ``hvd.DistributedOptimizer``, and ``hvd.allreduce_`` for one tensor."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.check: Check = "float32" if name == "horovod fp32" else "float16"
        self._compression = Counting(_COMPRESSIONS[name])

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        named = model.named_parameters()
        return model, hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=self._compression)

    def allreduce(self, tensor: Tensor) -> None:
        payload, _ = self._compression.compress(tensor)
        result = hvd.allreduce_(payload, name=f"bench.{self.name}", op=hvd.Average)
        if result.data_ptr() != tensor.data_ptr():
            tensor.copy_(result)  # to the caller's type in the same pass over memory

    def stats(self) -> dict[str, Any]:
        sent = ring_bytes(self._compression.payload, hvd.size())
        return {"bytes_sent": sent, "bytes_computed": True, "seconds": {}}


class Headroom:
    """Exchanges nothing: what is left of the time when communication is free.

    Every rank keeps its own gradients, so the result is wrong by design and is not checked.
    """

    name = "headroom"
    check: Check = "none"

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        return model, optimizer

    def stats(self) -> dict[str, Any]:
        return {"bytes_sent": 0, "seconds": {}}
