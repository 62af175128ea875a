"""The same training under either front: weights and saved states, to be compared byte by byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horovod_compress.engine import sealed
from tests.support.rank import arguments, rank, report
from tests.support.training import batch, digest, net

ASKED = arguments()
DDP = "HOROVOD_RANK" not in os.environ
LR = 0.02
SMALL_BUCKETS_MB = 0.002

if DDP:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import horovod_compress.ddp as hvc

    dist.init_process_group("gloo")
else:
    import horovod.torch as hvd

    import horovod_compress.torch as hvc  # type: ignore[no-redef]

    hvd.init()


def made(case: dict[str, Any], model: nn.Module) -> tuple[Any, Any, nn.Module]:
    """Return the compression, the optimizer and the model to be called, under this front."""
    named = list(model.named_parameters())
    options = {"verify_every": 5, "timeout": 30.0} | case.get("options", {})
    compression = hvc.Compression.create(case["method"], named, **options)
    codecs = compression._methods.codecs
    own = any(getattr(codec, "momentum", 0.0) or getattr(codec, "beta", 0.0) for codec in codecs)
    plain: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.0 if own else 0.9)
    if case.get("adam"):
        plain = torch.optim.Adam(model.parameters(), lr=0.002)
    if DDP:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS_MB, **case.get("ddp", {}))
        compression.register(wrapped, plain)
        return compression, plain, wrapped
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression)
    return compression, compression.attach(optimizer), model


def train(case: dict[str, Any]) -> dict[str, Any]:
    model = net(seed=1)
    compression, optimizer, called = made(case, model)
    folder = Path(case["folder"]) if "folder" in case else None
    if case.get("load"):
        assert folder is not None
        both = torch.load(folder / f"model.{rank()}", weights_only=True)
        model.load_state_dict(both["model"])
        optimizer.load_state_dict(both["optimizer"])
        compression.load(folder / "compression")
    for step in range(*case["steps"]):
        optimizer.zero_grad()
        called(batch(step, rank())).square().mean().backward()
        optimizer.step()
    state = compression.state_dict()
    if case.get("save"):
        assert folder is not None
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"model.{rank()}")
        compression.save(folder / "compression")
    moments = [kept["exp_avg_sq"] for kept in optimizer.state.values() if "exp_avg_sq" in kept]
    compression.close()
    return {"weights": digest(model.parameters()), "state": repr(state[sealed.KEY]), "moments": digest(moments)}


report({name: train(case) for name, case in ASKED["cases"].items()})
if DDP:
    dist.destroy_process_group()
