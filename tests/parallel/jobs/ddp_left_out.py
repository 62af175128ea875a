"""DistributedDataParallel with gradients that are not as others: sparse ones, and those of unused parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc
from tests.support.rank import rank, report

dist.init_process_group("gloo")


def generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 * step + rank())


# ---- sparse gradients ----


class Words(nn.Module):
    def __init__(self, sparse: bool = True, *, alone: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(50, 16, sparse=sparse)
        self.out = nn.Identity() if alone else nn.Linear(16, 16)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.embedding(words)).square().mean()  # type: ignore[no-any-return]


def words(method: str | None, steps: int = 6, *, alone: bool = False, **ddp: Any) -> list[Tensor]:
    model = Words(alone=alone)
    called = DistributedDataParallel(model, bucket_cap_mb=0.0005, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    compression = None
    if method:
        schedule = {"schedule": "layerwise"}
        compression = hvc.Compression.create(method, model.named_parameters(), timeout=20.0, **schedule)
        compression.register(called, optimizer)
    for step in range(steps):
        optimizer.zero_grad()
        called(torch.randint(50, (20,), generator=generator(step))).backward()
        assert model.embedding.weight.grad.is_sparse  # type: ignore[union-attr]
        optimizer.step()
    if compression:
        compression.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def sparse(**options: Any) -> dict[str, float]:
    """Return how far `none`, and a method that compresses the dense layer only, end from DDP alone."""
    alone, start = words(None, **options), list(Words(alone="alone" in options).parameters())
    found = {name: [far(a, b) for a, b in zip(alone, words(name, **options), strict=True)] for name in ("none", "topk")}
    shared = [torch.zeros_like(alone[0]) for _ in range(2)]
    dist.all_gather(shared, words("topk", **options)[0])
    assert torch.equal(*shared)
    return {
        "none": max(found["none"]),
        "compressed": max(found["topk"]),
        "moved": min(far(a, b.detach()) for a, b in zip(alone, start, strict=True)),
    }


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


class Two(nn.Module):
    """Parameters of two types, which never share a bucket."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 4).double()

    def forward(self, given: Tensor) -> Tensor:
        return self.second(self.first(given).double()).square().mean()  # type: ignore[no-any-return]


def two_types(method: str | None, **ddp: Any) -> list[Tensor]:
    model = Two()
    called = DistributedDataParallel(model, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression = hvc.Compression.create(method, model.named_parameters(), timeout=20.0) if method else None
    if compression:
        compression.register(called, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        called(torch.randn(6, 12, generator=generator(step))).backward()
        optimizer.step()
    if compression:
        assert compression.stats()["steps"] == 3
        compression.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---- parameters that are not used ----


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.early, self.first = nn.Linear(3, 3), nn.Linear(12, 12)
        self.left, self.right = nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, given: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(self.first(given)).square().mean()  # type: ignore[no-any-return]


def left_out(
    method: str, options: dict[str, Any], last: str, *, keep: bool = False, looks: bool = False, **ddp: Any
) -> dict[str, Any]:
    """Use the left branch three times, and then not on any rank, or on rank 1 only, for three steps.

    Args:
        last: the branch that rank 1 uses in these steps.
        keep: leave gradients where they are, as zeros.
        looks: take a gradient of the left branch in each step by torch.autograd.grad, as for a log.

    Returns:
        Whether all that is kept for the left branch is, bit for bit, as before, and so are its weights.
    """
    model = Branches()
    called = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.0005, **ddp)
    compression = hvc.Compression.create(method, model.named_parameters(), timeout=20.0, verify_every=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.early.requires_grad_(False)  # after wrapping, so that DDP still has a place for it
    compression.register(called, optimizer)
    for step in range(7):
        if step == 3:
            before = kept(compression, "left"), [p.detach().clone() for p in model.left.parameters()]
        branch = "left" if step in (0, 1, 2, 6) else last if rank() else "right"
        optimizer.zero_grad(set_to_none=not keep)
        value = called(torch.randn(6, 12, generator=generator(step)), branch)
        if looks:
            torch.autograd.grad(model.left(torch.ones(1, 12)).sum(), list(model.left.parameters()))
        value.backward()
        optimizer.step()
        if step == 5:
            after = kept(compression, "left"), [p.detach().clone() for p in model.left.parameters()]
            others = kept(compression, "right")
    compression.close()
    return {
        "waited": sum(float(value.abs().sum()) for value in before[0]) > 0,
        "kept": all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True)),
        "weights": all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True)),
        "others": sum(float(value.abs().sum()) for value in others) > 0,
        "verified": compression.stats()["verified"],
    }


def kept(compression: hvc.Compression, branch: str) -> list[Tensor]:
    """Return what the compression keeps for a branch."""
    states = compression._here().reducer.kept.states()
    return [value.clone() for kind in states.values() for name, value in kind.items() if name.startswith(branch)]


METHODS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.2},
    "ef_signsgd": {},
    "marsit": {"full_precision_every": 4},  # rounds that empty the residual are among the last ones
    "dgc": {"density": 0.2, "momentum": 0.9},
    "onebit_adam": {},
}
LEFT_OUT = {
    f"{method}{', views' if views else ''}{', zeros' if keep else ''}": (method, views, keep)
    for method in METHODS
    for views, keep in ((False, False), (True, False), (True, True))
    if method == "topk" or not keep
}

report(
    {
        "sparse": {
            "as ever": sparse(),
            "static graph": sparse(static_graph=True),
            "alone": sparse(alone=True),
        },
        "two types": {
            str(static): max(
                far(a, b) for a, b in zip(*(two_types(m, static_graph=static) for m in (None, "none")), strict=True)
            )
            for static in (False, True)
        },
        "left out": {
            name: {
                last: left_out(method, METHODS[method], last, keep=keep, gradient_as_bucket_view=views)
                for last in ("right", "left")
            }
            for name, (method, views, keep) in LEFT_OUT.items()
        },
        "looked at": {last: left_out("topk", METHODS["topk"], last, looks=True) for last in ("right", "left")},
    }
)
dist.destroy_process_group()
