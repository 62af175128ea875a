"""Four ranks that pretend to be on two hosts, or on one, or unevenly on two."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.nets import batch, digest, net
from tests.support.rank import arguments, check, folder, rank

RANK, HOROVOD = rank(), arguments()["front"] == "horovod"
if HOROVOD:
    import horovod.torch as hvd

    import horovod_compress.torch as front

    hvd.init()
else:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import horovod_compress.ddp as front

    dist.init_process_group("gloo")
torch.set_num_threads(1)
HOSTS = {"two": [0, 0, 1, 1], "mixed": [0, 1, 0, 1], "one": [0] * 4, "each": [0, 1, 2, 3], "uneven": [0, 0, 0, 1]}
OPTIONS = {"exchange": "hierarchical", "verify_every": 1, "timeout": 20.0, "warmup_steps": 0, "schedule": "size:10KB"}


def create(hosts: str, method: Any, model: nn.Module, **options: Any) -> Any:
    os.environ["GROUP_RANK"] = str(HOSTS[hosts][RANK])  # as a launcher numbers its hosts
    return front.Compression.create(method, model.named_parameters(), **OPTIONS | options)


STEPS = 9
SKETCH = {"error_feedback": "sketch", "density": 0.2, "cells": 0.5}


def optimized(compression: Any, model: nn.Module, path: str = "attached", adam: bool = False) -> tuple[Any, nn.Module]:
    """Return an optimizer with a compression, and what is called in place of the model."""
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer: Any = kind(model.parameters(), lr=0.01)
    if not HOROVOD:
        called = DistributedDataParallel(model)
        compression.register(called, optimizer)
        return optimizer, called
    if path == "update":
        return front.DistributedUpdateOptimizer(optimizer, list(model.named_parameters()), compression), model
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    return compression.attach(optimizer) if path == "attached" else optimizer, model


def stepped(optimizer: Any, called: nn.Module, steps: range) -> list[float]:
    """Return the losses of some steps."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = called(batch(step % 2, RANK)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def trained(hosts: str, method: Any, path: str = "attached", adam: bool = False, **options: Any) -> dict[str, Any]:
    """Return what some steps make of a model, and what was sent for it."""
    model = net()
    compression = create(hosts, method, model, **options)
    optimizer, called = optimized(compression, model, path, adam)
    losses = stepped(optimizer, called, range(STEPS))
    stats, state = compression.stats(), compression.state_dict()
    kept = {name: tensor.numel() for name, tensor in state["state"].get("residual", {}).items()}
    compression.close()
    return {
        "digest": digest(model.parameters()),
        "losses": losses[::2],  # of one batch
        "bytes": stats["bytes_sent"],
        "kept": sum(kept.values()),
        "hosts": state.get("hosts"),
        "verified": stats["verified"],
        "maps": shared_maps(),
    }


def resumed(name: str, method: Any) -> dict[str, Any]:
    """Return what steps make of a model behind a checkpoint, where it was saved and where it is loaded."""
    weights: dict[str, torch.Tensor] = {}

    def go_on(hosts: str, residuals: str = "refuse") -> tuple[str, str]:
        model = net()
        model.load_state_dict(weights or model.state_dict())
        compression = create(hosts, method, model)
        optimizer, called = optimized(compression, model)
        refusal = ""
        if weights:
            try:
                compression.load(folder() / name, residuals=residuals)
            except front.StateError as error:
                refusal = str(error)
        else:
            stepped(optimizer, called, range(3))
            weights.update({key: value.clone() for key, value in model.state_dict().items()})
            compression.save(folder() / name)
        stepped(optimizer, called, range(3, 6))
        compression.close()
        return digest(model.parameters()), refusal

    found = {"saved": go_on("two"), "loaded": go_on("two"), "elsewhere": go_on("mixed")}
    return found | {"reset": go_on("mixed", "reset"), "fresh": go_on("two", "reset")}


def emptied(hosts: str, method: Any, exchange: str = "hierarchical", **mode: int) -> dict[str, Any]:
    """Return where momentum is empty behind each step, and where the first one moved weights.

    That is of the elements that this rank's host has gradients for, and no other: every second row.
    """
    torch.manual_seed(0)
    model = nn.ParameterDict({"a": nn.Parameter(torch.randn(64, 100)), "b": nn.Parameter(torch.randn(40, 30))})
    compression = create(hosts, method, model, exchange=exchange, schedule="layerwise", min_elements=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = front.DistributedUpdateOptimizer(inner, list(model.named_parameters()), compression, **mode)
    mine = [weights[HOSTS["two"][RANK] :: 2] for weights in model.values()]
    before, zeros, moved = [weights.detach().clone() for weights in mine], [], []
    draws = torch.Generator().manual_seed(RANK)
    for step in range(6):
        optimizer.zero_grad()
        sum((weights * torch.randn(weights.shape, generator=draws)).sum() for weights in mine).backward()
        optimizer.step()
        momenta = [optimizer.state[weights]["momentum_buffer"] for weights in model.values()]
        zeros.append([(momentum[HOSTS["two"][RANK] :: 2] == 0) for momentum in momenta])
        if not step:
            moved = [weights != first for weights, first in zip(mine, before, strict=True)]
    compression.close()
    return {
        "zeros": digest(torch.cat([zero.flatten() for of_step in zeros for zero in of_step]).unsqueeze(0)),
        "number": [int(sum(zero.sum() for zero in of_step)) for of_step in zeros],
        "moved": all(torch.equal(*pair) for pair in zip(moved, zeros[0], strict=True)),
    }


def shared_maps() -> int:
    """Return how many open files of this process are shared memory of ours."""
    return sum("horovod-compress" in os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())


def refused(hosts: str, method: Any) -> str:
    try:
        create(hosts, method, net()).close()
    except front.ConfigError as error:
        return str(error)
    return ""


CASES: dict[str, Callable[[], Any]] = {
    "none": lambda: trained("two", "none"),
    "flat none": lambda: trained("two", "none", exchange="ring"),
    "marsit adam": lambda: trained("two", front.method("marsit", full_precision_every=5), adam=True),
    "each": lambda: trained("each", "marsit"),
    "uneven": lambda: refused("uneven", "none"),
    "resumed powersgd": lambda: resumed("powersgd", "powersgd"),
    "masked": lambda: refused("two", front.masked("signsgd")),
}
if HOROVOD:
    CASES |= {
        "mixed": lambda: trained("mixed", "none"),
        "one": lambda: trained("one", "marsit"),
        "stock": lambda: trained("two", "ef_signsgd", path="stock"),
        "update": lambda: trained("two", "marsit", path="update"),
        "powersgd": lambda: trained("two", "powersgd"),
        "topk": lambda: trained("two", "topk", schedule="layerwise"),
        "emptied": lambda: emptied("two", front.method("topk", density=0.1)),
        "emptied without hosts": lambda: emptied("two", front.method("topk", density=0.1), "auto"),
        "emptied later": lambda: emptied(
            "two", front.method("sparse_binary", density=0.1), communication_delay=2, overlap=1, fragments=2
        ),
        "resumed loco": lambda: resumed("loco", "loco"),
        "resumed sketch_fusion": lambda: resumed("sketch_fusion", front.method("sketch_fusion", **SKETCH)),
        "resumed marsit": lambda: resumed("marsit", "marsit"),
        "tuned": lambda: trained("two", "ef_signsgd", schedule="auto"),
    }
for name in arguments()["cases"]:
    check(name, CASES[name])
