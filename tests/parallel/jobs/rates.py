"""A learning-rate schedule that residuals or last results follow, on both paths and through a checkpoint."""

from __future__ import annotations

import io
from typing import Any

import horovod.torch as hvd
import torch

from tests.support.rank import check
from tests.support.states import resealed
from tests.support.training import digest, gathered, net, optimizer_for, train

hvd.init()
torch.set_num_threads(1)
RATES = [0.02, 0.04, 0.04, 0.03, 0.015, 0.0149, 0.01, 0.0]
SAVED = 4  # steps before the checkpoint; the rate changes right behind it


def steps(model: Any, optimizer: Any, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.param_groups[0]["lr"] = RATES[step]
        train(model, optimizer, [step])


def run(attach: bool, method: str = "topk", **options: Any) -> str:
    model = net()
    optimizer, compression = optimizer_for(model, method, attach, density=0.05, **options)
    steps(model, optimizer, 0, len(RATES))
    assert compression
    compression.close()
    return digest(model.parameters())


def resumed(forget: str = "", method: str = "topk", **options: Any) -> str:
    """Go on from a checkpoint; without the rates that what is kept stands for it is another run, the control."""
    model = net()
    optimizer, compression = optimizer_for(model, method, density=0.05, **options)
    assert compression
    steps(model, optimizer, 0, SAVED)
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), compression.state_dict()], file)
    compression.close()
    file.seek(0)
    weights, inner, kept = torch.load(file, weights_only=True)
    model = net(seed=3)
    model.load_state_dict(weights)
    optimizer, compression = optimizer_for(model, method, density=0.05, **options)
    assert compression
    optimizer.load_state_dict(inner)
    compression.load_state_dict(resealed({name: part for name, part in kept.items() if name != forget}))
    compression.load_state_dict(compression.state_dict())  # what was loaded is saved before the first gradient, too
    steps(model, optimizer, SAVED, len(RATES))
    compression.close()
    return digest(model.parameters())


def follows() -> dict[str, Any]:
    found = {"stock": run(False, follow_lr=True), "attached": run(True, follow_lr=True), "left": run(True)}
    found |= {"resumed": resumed(follow_lr=True), "forgotten": resumed("rates", follow_lr=True)}
    return found | {"ranks": gathered(found["stock"])}


def goes_on() -> dict[str, Any]:
    """Of the last result, without the option."""
    found = {"stock": run(False, "gmc"), "attached": run(True, "gmc"), "left": run(True, "dgc")}
    found |= {"resumed": resumed("", "gmc"), "forgotten": resumed("last_rates", "gmc")}
    return found | {"ranks": gathered(found["stock"])}


check("follows", follows)
check("goes on", goes_on)
