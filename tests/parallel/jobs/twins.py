"""Two networks of equal shapes and names, each with a compression; their gradients come in another order on rank 1."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.front import DDP, hvc, start
from tests.support.nets import digest
from tests.support.rank import check, rank

start()
torch.set_num_threads(1)
STEPS, LONG = 12, 20.0


def twin(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))


def given(step: int, number: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank()))


def prepared(model: nn.Module, number: int, way: str, label: str, **options: Any) -> tuple[Any, Any, Any]:
    """Return what is called, the optimizer and the compression."""
    kind: Any = torch.optim.Adam if number and options.pop("other optimizer") else torch.optim.SGD
    options.pop("other optimizer", None)
    optimizer = kind(model.parameters(), lr=0.01)
    prefix = f"{number}." if options.pop("prefixes") else ""
    named = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
    made = hvc.Compression.topk(named, density=0.3, timeout=LONG, min_elements=1, verify_every=4, **options)
    if DDP:
        called = model if way == "plain" else nn.parallel.DistributedDataParallel(model)
        return made.register(called, optimizer, second_moment="own"), optimizer, made
    import horovod.torch as hvd

    unique = [(f"{label}.{number}.{name}", parameter) for name, parameter in model.named_parameters()]
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=unique, compression=made)
    if way == "attached":
        made.attach(optimizer, second_moment="own")
    return model, optimizer, made


def train(way: str, crossed: bool, label: str, **options: Any) -> tuple[list[str], list[bool]]:
    """Return a hash of the weights of each twin, and whether rank 0 has begun to choose buckets for it.

    Args:
        crossed: gradients of the twins come in another order on rank 1.
    """
    models = [twin(1), twin(2)]
    parts = [prepared(model, number, way, f"{label}{crossed}", **options) for number, model in enumerate(models)]
    try:
        for step in range(STEPS):
            for _, optimizer, _ in parts:
                optimizer.zero_grad()
            order = [1, 0] if crossed and rank() else [0, 1]
            losses = {number: parts[number][0](given(step, number)).square().mean() for number in order}
            (losses[0] + losses[1]).backward()
            for _, optimizer, _ in parts:
                optimizer.step()
        tuners = [made._session.steps.tuner for *_, made in parts]
        return [digest(model.parameters()) for model in models], [bool(tuner and tuner._tuning) for tuner in tuners]
    finally:
        for *_, made in parts:
            made.close()


USUAL = {"prefixes": False, "other optimizer": False}
CASES: dict[str, dict[str, Any]] = {
    "twins": USUAL,
    "other names": USUAL | {"prefixes": True},
    "another optimizer": USUAL | {"other optimizer": True},
    "buckets are chosen": USUAL | {"schedule": "mergecomp:3"},
    "buckets are chosen, other names": USUAL | {"schedule": "mergecomp:3", "prefixes": True},
}
for way in ("plain", "ddp") if DDP else ("attached", "tokens"):
    for name, options in CASES.items():

        def play(way: str = way, name: str = name, options: dict[str, Any] = options) -> dict[str, Any]:
            both = {
                label: train(way, label == "crossed", f"{name}{way}", **options) for label in ("in order", "crossed")
            }
            return {label: weights for label, (weights, _) in both.items()} | {
                f"chosen {label}": begun for label, (_, begun) in both.items()
            }

        check(f"{name}, {way}", play)
