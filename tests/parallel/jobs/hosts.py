"""Four ranks that pretend to be on two hosts, or on one, or unevenly on two."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.nets import batch, digest, net
from tests.support.rank import arguments, check, rank

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


def trained(hosts: str, method: Any, path: str = "attached", adam: bool = False, **options: Any) -> dict[str, Any]:
    """Return what some steps make of a model, and what was sent for it."""
    model = net()
    compression = create(hosts, method, model, **options)
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer: Any = kind(model.parameters(), lr=0.01)
    called: nn.Module = model
    if not HOROVOD:
        called = DistributedDataParallel(model)
        compression.register(called, optimizer)
    elif path == "update":
        optimizer = front.DistributedUpdateOptimizer(optimizer, list(model.named_parameters()), compression)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
        optimizer = compression.attach(optimizer) if path == "attached" else optimizer
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = called(batch(step % 2, RANK)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
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
        "tuned": lambda: trained("two", "ef_signsgd", schedule="auto"),
    }
for name in arguments()["cases"]:
    check(name, CASES[name])
