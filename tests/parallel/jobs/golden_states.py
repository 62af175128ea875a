"""Writes golden checkpoints under either front, or loads them and saves them again: see tests/golden/states.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.golden.states import SPECS, inputs
from tests.golden.trained import adamw, first_weights, sgd
from tests.support.front import DDP, hvc, start, trained
from tests.support.rank import arguments, meet, rank, report

ASKED = arguments()
UPDATES = "optimizer"  # the file of what update mode keeps in the optimizer, with the rank's number


class Linear(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in first_weights(SPECS).items():
            self.register_parameter(name, parameter)

    def forward(self, *inputs: Tensor) -> Any:
        return sum((p * x).sum().double() for p, x in zip(self.parameters(), inputs, strict=True))


def made(case: dict[str, Any]) -> tuple[Linear, Any, Any, Any]:
    """Return the model, what is called in its place, the optimizer, and the compression."""
    model = Linear()
    named, own = list(model.named_parameters()), case["method"]
    make = hvc.Compression.per_layer if isinstance(own, dict) else hvc.Compression.create
    compression = make(own, named, timeout=20.0, verify_every=2, schedule="layerwise")
    plain = {"adamw": adamw, "sgd": sgd}[case["optimizer"]](model.parameters())
    if "updates" in case:
        return model, model, hvc.DistributedUpdateOptimizer(plain, named, compression, **case["updates"]), compression
    return model, *trained(model, plain, compression, case["attach"]), compression


def write(name: str, case: dict[str, Any]) -> None:
    _, called, optimizer, compression = made(case)
    for step in range(ASKED["steps"]):
        optimizer.zero_grad()
        called(*inputs(step)[rank()].values()).backward()
        optimizer.step()
    save(name, case, optimizer, compression)


def again(name: str, case: dict[str, Any]) -> None:
    """Load a golden checkpoint, and save what was loaded."""
    folder = Path(ASKED["from"], name)
    _, _, optimizer, compression = made(case)
    compression.load(folder)
    if "updates" in case:
        optimizer.load_state_dict(torch.load(folder / f"{UPDATES}.{rank()}.pt", weights_only=True))
    save(name, case, optimizer, compression)


def save(name: str, case: dict[str, Any], optimizer: Any, compression: Any) -> None:
    folder = Path(ASKED["into"], name)
    compression.save(folder)
    if "updates" in case:
        torch.save(optimizer.state_dict(), folder / f"{UPDATES}.{rank()}.pt")
    compression.close()


start()
torch.set_num_threads(1)
for name, case in ASKED["cases"].items():
    {"write": write, "again": again}[ASKED["what"]](name, case)
    meet()
report(sorted(ASKED["cases"]))
if DDP:
    torch.distributed.destroy_process_group()
