"""DistributedDataParallel in all the ways in which it is used, with `none` beside DDP alone; and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc
from tests.support.logs import told
from tests.support.rank import rank, refusal, report

dist.init_process_group("gloo")
ODD = rank() == 1
STEPS = 5
refused = partial(refusal, kind=hvc.HorovodCompressError)
Loss = Callable[[nn.Module, int], Tensor]


class Forked(nn.Module):
    """Two branches, of which a forward pass may use one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 12))
        self.left, self.right, self.never = nn.Linear(12, 5), nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, given: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(self.first(given))


def data(step: int) -> Tensor:
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank()))


def both(called: nn.Module, step: int) -> Tensor:
    given = data(step)
    return sum((called(given, name) for name in ("left",)), torch.zeros(())).square().mean()


def by_rank(called: nn.Module, step: int) -> Tensor:
    return called(data(step), "left" if (step + rank()) % 2 else "right").square().mean()


def run(
    method: str | None, loss: Loss, ddp: dict[str, Any], *, accumulate: bool = False, keep_grads: bool = False
) -> list[Tensor]:
    """Train and return the weights; without a method, DDP alone."""
    model = Forked()
    called = DistributedDataParallel(model, bucket_cap_mb=0.001, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compression = None
    if method:
        compression = hvc.Compression.create(method, model.named_parameters(), verify_every=1, timeout=20.0)
        compression.register(called, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not keep_grads)
        for part in range(3 if accumulate else 1):
            with called.no_sync() if accumulate and part < 2 else contextlib.nullcontext():
                loss(called, 10 * step + part).backward()
        optimizer.step()
    if compression:
        assert compression.stats()["steps"] == STEPS and compression.stats()["verified"] == STEPS
        compression.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


UNUSED = {"find_unused_parameters": True}
WAYS: dict[str, tuple[Loss, dict[str, Any], dict[str, Any]]] = {
    "unused": (both, UNUSED, {}),
    "unused on some ranks": (by_rank, UNUSED, {}),
    "unused, views": (by_rank, UNUSED | {"gradient_as_bucket_view": True}, {}),
    "static graph": (both, {"static_graph": True}, {}),
    "static graph, views": (both, {"static_graph": True, "gradient_as_bucket_view": True}, {"keep_grads": True}),
    "accumulation": (by_rank, UNUSED, {"accumulate": True}),
    "accumulation, views": (by_rank, UNUSED | {"gradient_as_bucket_view": True}, {"accumulate": True}),
}


def way(name: str) -> float:
    loss, ddp, options = WAYS[name]
    alone, ours = run(None, loss, ddp, **options), run("none", loss, ddp, **options)
    moved = max(float((a - b.detach()).abs().max()) for a, b in zip(ours, Forked().parameters(), strict=True))
    assert moved > 0.01
    shared = [torch.zeros_like(a) for _ in range(2) for a in ours[:1]]
    dist.all_gather(shared, ours[0])
    assert torch.equal(*shared)
    return max(float((a - b).abs().max()) for a, b in zip(alone, ours, strict=True))


def rebuilt() -> list[list[int]]:
    """Return the sizes of DDP's buckets in the first and in the last step: they are built anew after the first."""
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4)))
    called = DistributedDataParallel(model, bucket_cap_mb=0.0007)
    compression = hvc.Compression.ef_signsgd(model.named_parameters(), timeout=20.0)
    seen: list[list[int]] = [[]]

    def hook(state: Any, bucket: dist.GradBucket) -> Any:
        seen[-1].append(bucket.buffer().numel())
        return hvc.ddp_hook(state, bucket)

    hook.__annotations__.clear()
    called.register_comm_hook(compression, hook)
    for step in range(3):
        seen.append([])
        called(data(step)).sum().backward()
    compression.close()
    return [seen[1], seen[-1]]


def small() -> tuple[nn.Linear, DistributedDataParallel]:
    torch.manual_seed(5)
    model = nn.Linear(12, 4)
    return model, DistributedDataParallel(model)


def two_models() -> bool:
    pairs = [small() for _ in range(2)]
    made = []
    for number, (model, called) in enumerate(pairs):
        made.append(hvc.Compression.create(("marsit", "none")[number], model.named_parameters(), timeout=20.0))
        made[-1].register(called)
    for step in range(3):
        sum(called(data(step)).square().mean() for _, called in pairs).backward()
    for compression in made:
        compression.close()
    return all(model.weight.grad is not None for model, _ in pairs)


def scaled() -> list[float]:
    """Return by how much the residuals changed when the scale was halved."""
    model, called = small()
    compression = hvc.Compression.ef_signsgd(model.named_parameters(), timeout=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compression.register(called, optimizer)
    scaler = compression.follow(torch.amp.GradScaler("cpu", init_scale=64.0))
    found = []
    for step in range(3):
        optimizer.zero_grad()
        loss = called(data(step)).square().mean() * (float("nan") if step == 1 and ODD else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = compression.stats()["residual_norm"]
        scaler.update()
        found.append(round(compression.stats()["residual_norm"] / before, 4))
    compression.close()
    return found


def frozen() -> bool:
    """Freeze in the middle, as for the last layers of a fine-tuning: the weights stay as they are."""
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4))
    called = DistributedDataParallel(model, find_unused_parameters=True)
    compression = hvc.Compression.ef_signsgd(model.named_parameters(), timeout=20.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compression.register(called, optimizer)
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(False)
            before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        called(data(step)).square().mean().backward()
        optimizer.step()
    compression.close()
    return torch.equal(before, model[0].weight)


def not_finite() -> list[str]:
    """A step that is refused, and the next one, which is as any other."""
    model, called = small()
    compression = hvc.Compression.topk(model.named_parameters(), nonfinite="raise", timeout=20.0)
    compression.register(called)
    found = []
    for step in range(3):
        model.zero_grad()
        try:
            (called(data(step)).sum() * (float("inf") if step == 1 and ODD else 1.0)).backward()
            found.append("fine")
        except hvc.NonFiniteError as error:
            found.append(str(error)[:40])
    compression.close()
    return found


def made(model: nn.Module, **options: Any) -> hvc.Compression:
    return hvc.Compression.none(model.named_parameters(), timeout=20.0, **options)


def joined() -> None:
    model, called = small()
    made(model).register(called)
    with called.join():
        called(data(0)).sum().backward()


def other_model() -> None:
    made(small()[0]).register(small()[1])


def twice() -> None:
    model, called = small()
    made(model).register(called)
    made(model).register(called)


def late_optimizer() -> None:
    model, called = small()
    compression = made(model)
    compression.register(called)
    called(data(0)).sum().backward()
    compression.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def skipping() -> None:
    model, called = small()
    called.skip_all_reduce_unused_params = True  # type: ignore[attr-defined]  # newer versions have an argument for it
    made(model).register(called)


def outside() -> None:
    model, _ = small()
    made(model).exchange(_Bucket())  # type: ignore[arg-type]


class _Bucket:
    def buffer(self) -> Tensor:
        return torch.zeros(3)


def climbing() -> list[str]:
    """Return what is said of weights that are each rank's own for a pass, as SAM's are, and are then set back."""
    with told() as texts:
        model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3))
        called, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.05)
        compression = hvc.Compression.marsit(model.named_parameters(), verify_every=1, timeout=20.0)
        compression.register(called, optimizer)
        for step in range(STEPS):
            with called.no_sync():
                called(data(step)).square().mean().backward()
            with torch.no_grad():
                before = [parameter.clone() for parameter in model.parameters()]
                for parameter in model.parameters():
                    parameter.add_(0.1 * parameter.grad)
            optimizer.zero_grad()
            called(data(step)).square().mean().backward()
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), before, strict=True):
                    parameter.copy_(value)
            optimizer.step()
            optimizer.zero_grad()
        compression.close()
    return [text for text in texts if "weights differ" in text]


def updates() -> None:
    model = nn.Linear(2, 2)
    compression = made(model)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    hvc.DistributedUpdateOptimizer(plain, model.named_parameters(), compression)
    compression.register(model)


def averaged(*, alone: bool = False, other: bool = False, dropped: bool = False, half: bool = False) -> None:
    """Make an update optimizer for a model in DistributedDataParallel.

    Args:
        alone: that is of one rank, as where one rank of each host exchanges updates.
        other: of another model.
        dropped: nothing refers to the wrapper any more.
        half: torch has refused to make it, and somebody keeps that error.
    """
    model = nn.Linear(2, 2)
    if half:
        with pytest.raises(RuntimeError) as kept:
            DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
        assert kept
    own = [dist.new_group([each]) for each in range(dist.get_world_size())][rank()] if alone else None
    called = DistributedDataParallel(nn.Linear(2, 2) if other or half else model, process_group=own)
    if dropped:
        del called
    compression = made(model)
    try:
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        hvc.DistributedUpdateOptimizer(plain, model.named_parameters(), compression)
    finally:
        compression.close()


def local_steps() -> None:
    model = nn.Linear(2, 2)
    compression = hvc.Compression.diloco(model.named_parameters())
    compression.register(model)
    model(torch.ones(1, 2)).sum().backward()


REFUSALS: dict[str, Callable[[], object]] = {
    "join": joined,
    "other model": other_model,
    "no model": lambda: made(nn.Linear(2, 2)).register([]),  # type: ignore[type-var]
    "twice": twice,
    "late optimizer": late_optimizer,
    "skipping": skipping,
    "outside": outside,
    "updates": updates,
    "averaged": averaged,
    "averaged alone": lambda: averaged(alone=True),
    "averaged elsewhere": lambda: averaged(other=True),
    "averaged before": lambda: averaged(dropped=True),
    "averaged in vain": lambda: averaged(half=True),
    "local steps": local_steps,
    "group": lambda: hvc.Compression.none(nn.Linear(2, 2).named_parameters(), process_group="all"),
    "mismatch": lambda: made(nn.Linear(2, 2), seed=rank()),
    "one rank": lambda: made(nn.Linear(2, 2), **({"colour": 3} if ODD else {})),
    "control": lambda: made(nn.Linear(2, 2)).close(),
}

report(
    {
        "ways": {name: way(name) for name in WAYS},
        "rebuilt": rebuilt(),
        "two models": two_models(),
        "scaled": scaled(),
        "climbing": climbing(),
        "frozen": frozen(),
        "not finite": not_finite(),
        "refused": {name: refused(case) for name, case in REFUSALS.items()},
    }
)
dist.destroy_process_group()
