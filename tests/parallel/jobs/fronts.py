"""The same training under either front: weights and saved states, to be compared byte by byte."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horovod_compress.engine.saved import checksums
from horovod_compress.engine.shards import local
from tests.support import front
from tests.support.front import DDP, start, trained
from tests.support.nets import batch, digest, net
from tests.support.rank import arguments, rank, report

ASKED = arguments()
hvc: Any = front.hvc
if ASKED["front"] == "fsdp":  # over shards of one rank, which has the whole model
    import horovod_compress.fsdp as hvc
LR = 0.02
SMALL_BUCKETS_MB = 0.002


def made(case: dict[str, Any], model: nn.Sequential) -> tuple[Any, Any, nn.Module]:
    """Return the compression, the optimizer and the model to be called, under this front."""
    named = list(model.named_parameters())
    options = {"verify_every": 5, "timeout": 30.0} | case.get("options", {})
    compression = created(case, named, options)
    if ASKED["front"] == "fsdp":
        compression.register(model, replicate=grid()["replicate"])
    codecs = compression._session.methods.codecs
    own = any(getattr(codec, "momentum", 0.0) or getattr(codec, "beta", 0.0) for codec in codecs)
    plain: Any = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.0 if own else 0.9)
    if "adam" in case:
        plain = torch.optim.AdamW(model.parameters(), **{"lr": 0.002} | case["adam"])
    if "updates" in case:
        return compression, hvc.DistributedUpdateOptimizer(plain, named, compression, **case["updates"]), model
    ddp = {"bucket_cap_mb": SMALL_BUCKETS_MB} | case.get("ddp", {})
    if ASKED["front"] == "fsdp":
        return compression, compression.attach(plain, **case.get("attach", {})), model
    called, optimizer = trained(model, plain, compression, case.get("attach"), ddp, plain=ASKED["front"] == "plain")
    return compression, optimizer, called


@cache
def grid() -> Any:
    """Return a mesh of replicas that have one shard."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = torch.distributed.get_world_size()
    return init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))


def divided(model: nn.Sequential) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[3], mesh=grid()["shard"])
    fully_shard(model, mesh=grid()["shard"])


def created(case: dict[str, Any], named: Any, options: dict[str, Any]) -> Any:
    """Return the compression; a method may be one for each layer by pattern, or by step."""
    if "by step" in case:
        return hvc.Compression.create(hvc.by_step(dict(case["by step"])), named, **options)
    if isinstance(case["method"], dict):
        return hvc.Compression.per_layer(case["method"], named, **options)
    return hvc.Compression.create(case["method"], named, **options)


def train(case: dict[str, Any]) -> dict[str, Any]:
    model = net(seed=1)
    if ASKED["front"] == "fsdp":
        divided(model)
    compression, optimizer, called = made(case, model)
    folder = Path(case["folder"]) if "folder" in case else None
    if case.get("load"):
        assert folder is not None
        both = torch.load(folder / f"model.{rank()}", weights_only=True)
        model.load_state_dict(both["model"])
        optimizer.load_state_dict(both["optimizer"])
        compression.load(folder / "compression")
    refused = []
    for step in range(*case["steps"]):
        optimizer.zero_grad()
        model[3].requires_grad_(step >= case.get("thaws", 0))
        loss = called(batch(step, rank())).square().mean()
        try:
            (loss * float("nan") if case.get("nan") == [step, rank()] else loss).backward()
            optimizer.step()
        except hvc.NonFiniteError as error:
            refused.append(str(error))
    apart = digest(map(local, model.parameters()))
    kept = optimizer.state_dict().get("horovod_compress", {})
    if "updates" in case:
        optimizer.flush()
    state = compression._saved.state()
    if case.get("save"):
        assert folder is not None
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / f"model.{rank()}")
        compression.save(folder / "compression")
    weights = [*map(local, model.parameters())]
    moments = [local(kept["exp_avg_sq"]) for kept in optimizer.state.values() if "exp_avg_sq" in kept]
    compression.close()
    found = {"weights": digest(weights), "moments": digest(moments)}
    updates = [apart, repr(kept.get(checksums.KEY))] if "updates" in case else []
    return found | {"state": repr(state[checksums.KEY]), "refused": refused, "updates": updates}


start()
report({name: train(case) for name, case in ASKED["cases"].items()})
if DDP:
    torch.distributed.destroy_process_group()
