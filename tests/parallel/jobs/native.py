"""Buckets that the transport adds up by itself, on real processes."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import horovod_compress.torch as hvc
from tests.support.rank import check
from tests.support.training import digest, gathered

hvd.init()
torch.set_num_threads(1)
RANK, WORLD = hvd.rank(), hvd.size()
COUNT = 100_003  # does not divide by anything


def collectives(compression: hvc.Compression) -> list[str]:
    reducer = compression._session.reducer
    return [state.round(reducer.step).collective.name for state in reducer.buckets]


def reduced(dtype: torch.dtype, spoil: bool = False, method: str = "none", **options: Any) -> dict[str, Any]:
    """Return what two steps make of gradients that differ between ranks."""
    parameters = [(name, nn.Parameter(torch.zeros(COUNT, dtype=dtype))) for name in "ab"]
    compression = getattr(hvc.Compression, method)(parameters, schedule="single", verify_every=1, **options)
    found: dict[str, Any] = {"collectives": collectives(compression), "digests": [], "off": [], "finite": []}
    generator = torch.Generator().manual_seed(RANK)
    for step in range(2):
        grads = [torch.randn(COUNT, generator=generator, dtype=torch.float64).to(dtype) for _ in parameters]
        means = [hvd.allreduce(grad.double(), name=f"mean {step} {at}") for at, grad in enumerate(grads)]
        if spoil and step == 0 and RANK == WORLD - 1:
            grads[1][5] = float("inf")
        results = reduce(compression, grads)
        found["digests"].append(gathered(digest(results)))
        found["off"].append(max(float((r.double() - m).abs().max()) for r, m in zip(results, means, strict=True)))
        found["finite"].append([int(r.isfinite().sum()) for r in results])
    found["bytes"] = compression.stats()["bytes_sent"]
    compression.close()
    return found


def reduce(compression: hvc.Compression, grads: list[Tensor]) -> list[Tensor]:
    reducer = compression._session.reducer
    names = reducer.plan.names()
    step = -1
    for index, name in enumerate(names):
        step = reducer.offer(index, grads["ab".index(name)])
    results = {name: reducer.result(index, step) for index, name in enumerate(names)}
    return [results[name] for name in "ab"]


check("float32", lambda: reduced(torch.float32))
check("float64", lambda: reduced(torch.float64))
check("float16", lambda: reduced(torch.float16))
check("ring", lambda: reduced(torch.float32, exchange="ring"))
check("spoiled", lambda: reduced(torch.float32, spoil=True))
check("full precision round", lambda: reduced(torch.float32, method="marsit"))
