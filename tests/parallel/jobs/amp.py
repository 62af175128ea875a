"""Gradient scalers, and models that torch compiles: the same bits as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvc
from tests.support.rank import check
from tests.support.training import digest, loss_of, net, optimizer_for, train

STEPS = range(7)
METHODS = {
    "marsit": {"full_precision_every": 4},
    "topk": {"density": 0.1},
    "onebit_adam": {},
    "sketch_fusion": {"density": 0.1},
}
hvd.init()
torch.set_num_threads(1)


def scaled(method: str, follow: bool, overflow: int = -1, saved: str = "") -> list[str]:
    """Train with a scale that doubles every other step, and return the weights after each.

    Args:
        overflow: a step in which one rank's gradients are infinite.
        saved: begin again from a checkpoint, half way, and load what in which order: "scaler", "compression", or
            "neither scaler", whose scale is another then.
    """
    model, digests = net(), []
    optimizer, compression = optimizer_for(model, method, True, **METHODS[method])
    assert compression
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scaler = compression.follow(scaler) if follow else scaler
    for step in STEPS:
        if saved and step == 4:
            state = {"scaler": scaler.state_dict(), "compression": compression.state_dict()}
            again = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=2)
            inner = {n: dict(v) if isinstance(v, dict) else v for n, v in optimizer.state_dict().items()}
            compression.close()
            weights, model = model.state_dict(), net(seed=9)
            model.load_state_dict(weights)
            # By the same names: random signs that measure norms go by them, and a ratio in and out again rounds.
            optimizer, compression = optimizer_for(model, method, True, **METHODS[method])
            assert compression
            optimizer.load_state_dict(inner)
            if saved == "compression":
                compression.load_state_dict(state["compression"])
            scaler = compression.follow(again)
            if saved != "neither scaler":
                scaler.load_state_dict(state["scaler"])
            if saved != "compression":
                compression.load_state_dict(state["compression"])
        optimizer.zero_grad()
        factor = float("inf") if step == overflow and hvd.rank() == 1 else 1.0
        scaler.scale(loss_of(model, step) * factor).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        digests.append(digest(model.parameters()))
    compression.close()
    return digests


def plain(method: str, wrap: Callable[[nn.Module], nn.Module] = lambda model: model, attach: bool = True) -> list[str]:
    model, digests = net(), []
    optimizer, compression = optimizer_for(model, method, attach, **METHODS[method])
    run = wrap(model)
    for step in STEPS:
        train(run, optimizer, [step])
        digests.append(digest(model.parameters()))
    if compression:
        compression.close()
    return digests


def scaler_of(method: str) -> dict[str, Any]:
    return {
        "plain": plain(method),
        "followed": scaled(method, True),
        "left": scaled(method, False),
        "resumed": [scaled(method, True, saved=order) for order in ("scaler", "compression", "neither scaler")],
        "skipped": scaled(method, True, overflow=3),
    }


def refusals() -> list[str]:
    model, found = net(), []
    _, compression = optimizer_for(model, "marsit")
    assert compression
    compression.follow(torch.amp.GradScaler("cpu"))
    try:
        compression.follow(torch.amp.GradScaler("cpu"))
    except hvc.ConfigError as error:
        found.append(str(error))
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvc.DistributedUpdateOptimizer(optimizer, list(model.named_parameters()), compression)
    except hvc.ConfigError as error:
        found.append(str(error))
    compression.close()
    return found


def compiled(method: str) -> dict[str, Any]:
    def wrap(model: nn.Module) -> nn.Module:
        return torch.compile(model, backend="aot_eager")  # type: ignore[return-value]

    return {"plain": plain(method), "attached": plain(method, wrap), "stock": plain(method, wrap, attach=False)}


for name in METHODS:
    check(f"scaler {name}", lambda: scaler_of(name))
check("refusals", refusals)
for name in ("marsit", "topk"):
    check(f"compiled {name}", lambda: compiled(name))
