"""Weight updates exchanged instead of gradients, with every method."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvc
from horovod_compress.codecs import registry
from tests.support.rank import check
from tests.support.training import batch, digest, farthest, gathered, net, optimizer_for, train, weights

hvd.init()
torch.set_num_threads(1)
RANK = hvd.rank()


def normed(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 10))


def wrapped(
    model: nn.Module, method: str, kind: str = "sgd", delay: int | None = None, mode: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, hvc.Compression]:
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
        "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    }
    named = list(model.named_parameters())
    compression = hvc.Compression.create(method, named, **{"verify_every": 1, "timeout": 20.0} | options)
    return hvc.DistributedUpdateOptimizer(makers[kind](model.parameters()), named, compression, delay, **mode or {}), compression


def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(batch(step, RANK)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def all_alike(model: nn.Module) -> bool:
    return len(set(gathered(digest(model.parameters())))) == 1


def every_method(method: str, sample: dict[str, Any], kind: str) -> dict[str, Any]:
    model = normed()
    optimizer, compression = wrapped(model, method, kind, 2, {"warmup_steps": 2} if kind == "adam" else None, **sample)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    alike = []
    for step in range(8):
        one_step(model, optimizer, step)
        schedule.step()
        alike.append(all_alike(model))
    stats = compression.stats()
    compression.close()
    return {"alike": alike, "lr": optimizer.param_groups[0]["lr"], "verified": stats["verified"] == stats["steps"] > 0,
            "moved": farthest(weights(model), weights(normed()))}  # fmt: skip


def as_gradients() -> float:
    """Updates are linear in gradients with SGD: the mean update is that of the mean gradient."""
    stock, ours = net(), net()
    optimizer, compression = optimizer_for(stock, "none", attach=True)
    train(stock, optimizer, range(4))
    compression.close()
    named = list(ours.named_parameters())
    compression = hvc.Compression.none(named)
    plain = torch.optim.SGD(ours.parameters(), lr=0.05, momentum=0.9)
    train(ours, hvc.DistributedUpdateOptimizer(plain, named, compression), range(4))
    compression.close()
    assert farthest(weights(ours), weights(net())) > 1e-4
    return farthest(weights(stock), weights(ours))


def resumed(kind: str) -> bool:
    """5 steps = 3 steps, in the middle of a delay, + save + load + 2 steps, in every bit."""
    def run(steps: range, saved: dict[str, Any] | None) -> dict[str, Any]:
        model = normed()
        optimizer, compression = wrapped(model, "marsit", kind, 2, {"warmup_steps": 0}, full_precision_every=2)
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            compression.load_state_dict(saved["compression"])
        for step in steps:
            one_step(model, optimizer, step)
        found = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "compression": compression.state_dict()}
        compression.close()
        return {name: {**part} for name, part in found.items()}

    whole = run(range(5), None)
    again = run(range(3, 5), run(range(3), None))
    return digest(whole["model"].values()) == digest(again["model"].values())


def second_moment() -> dict[str, Any]:
    """It is the same on every rank, and moves in full-precision rounds only; the first moment is not."""
    model = net()
    optimizer, compression = wrapped(model, "marsit", "adam", 1, {"warmup_steps": 3}, full_precision_every=4)
    second, first = [], []
    for step in range(12):
        one_step(model, optimizer, step)
        second.append(gathered(digest(s["exp_avg_sq"] for s in optimizer.state.values())))
        first.append(gathered(digest(s["exp_avg"] for s in optimizer.state.values())))
    compression.close()
    moved = [a[0] != b[0] for a, b in zip(second, second[1:])]
    return {"shared": all(len(set(s)) == 1 for s in second), "own": len(set(first[-1])), "moved": moved}


def masked() -> dict[str, int]:
    """Momentum is empty where this rank's update was sent, and only there."""
    left = {}
    for masking in (True, False):
        model = net()
        options = {"density": 0.05, "schedule": "single"}
        optimizer, compression = wrapped(model, "sparse_binary", mode={"momentum_masking": masking}, **options)
        for step in range(3):
            one_step(model, optimizer, step)
        left[str(masking)] = sum(int((s["momentum_buffer"] == 0).sum()) for s in optimizer.state.values())
        compression.close()
    return left


def not_finite(nonfinite: str) -> dict[str, Any]:
    model = net()
    optimizer, compression = wrapped(model, "marsit", nonfinite=nonfinite)
    one_step(model, optimizer, 0)
    before = weights(model)
    model(batch(1, RANK)).square().mean().backward()
    if RANK == 1:
        next(model.parameters()).grad.fill_(float("nan"))
    try:
        optimizer.step()
        error = None
    except hvc.NonFiniteError as caught:
        error = str(caught)
    same = farthest(weights(model), before)
    compression.close()
    return {"error": error, "from before": same, "alike": all_alike(model)}


def refusals() -> list[str]:
    found = []

    def refuse(make: Any) -> None:
        try:
            make()
            found.append("accepted")
        except hvc.ConfigError as error:
            found.append(str(error))

    model = net()
    named = list(model.named_parameters())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = hvc.Compression.marsit(named)
    make = hvc.DistributedUpdateOptimizer
    refuse(lambda: make(hvd.DistributedOptimizer(sgd, named), named, compression))
    refuse(lambda: make(sgd, named, compression, 0))
    refuse(lambda: make(sgd, named, compression, second_moment="shared"))
    refuse(lambda: make(torch.optim.SGD(list(model.parameters())[:2], lr=0.1), named, compression))
    refuse(lambda: make(sgd, list(net().named_parameters()), compression))
    optimizer = make(sgd, named, compression)
    refuse(lambda: make(torch.optim.SGD(model.parameters(), lr=0.1), named, compression))
    refuse(lambda: optimizer.load_state_dict(sgd.state_dict()))
    refuse(lambda: compression.compress(torch.zeros(3)))
    compression.close()
    return found


for method in registry.available():
    for number, sample in enumerate(registry.codec_class(method).samples):
        kind = "adam" if number % 2 else "sgd"
        check(f"{method} {number}", lambda: every_method(method, sample, kind))
check("as gradients", as_gradients)
check("resumed sgd", lambda: resumed("sgd"))
check("resumed adam", lambda: resumed("adam"))
check("second moment", second_moment)
check("masked", masked)
for policy in ("propagate", "raise"):
    check(f"not finite {policy}", lambda: not_finite(policy))
check("refusals", refusals)
