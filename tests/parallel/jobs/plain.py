"""Modules that are not wrapped, in the ways in which they are used; `none` beside DistributedDataParallel alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import horovod_compress.ddp as hvc
from tests.support.logs import told
from tests.support.nets import digest
from tests.support.rank import rank, refusal, report

dist.init_process_group("gloo")
ODD = rank() == 1
STEPS = 5
LONG = 30.0
refused = partial(refusal, kind=hvc.HorovodCompressError)


class Forked(nn.Module):
    """Two branches, of which a forward pass may use one, behind an embedding."""

    def __init__(self, *, sparse: bool = False, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(20, 12, sparse=sparse)
        self.first = nn.Sequential(nn.Linear(12, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 12))
        self.left, self.right, self.never = nn.Linear(12, 5), nn.Linear(12, 5), nn.Linear(12, 5)

    def forward(self, given: Tensor, branch: str, how: str = "") -> Tensor:
        found = self.words(given)
        found = checkpoint(self.first, found, use_reentrant=how == "reentrant") if how else self.first(found)
        return getattr(self, branch)(found).square().mean()  # type: ignore[no-any-return]


def data(step: int) -> Tensor:
    return torch.randint(20, (8,), generator=torch.Generator().manual_seed(100 * step + rank()))


def branch(step: int, by_rank: bool) -> str:
    return "left" if not by_rank or (step + rank()) % 2 else "right"


def train(method: str | None, case: dict[str, Any]) -> tuple[list[Tensor], list[float]]:
    """Train and return the weights, and the norm of the gradients in each step; without a method, DDP alone."""
    model = Forked(sparse=case.get("sparse", False), seed=3 if method is None else 3 + rank())
    called: nn.Module = model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if case.get("sparse") else 0.9)
    passes, compression = case.get("passes", 1), None
    if method:
        options = {"schedule": "layerwise", "verify_every": 1, "timeout": LONG}
        compression = hvc.Compression.create(method, model.named_parameters(), **options)
        compression.register(model, optimizer)
    else:
        called = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=not case.get("keep_grads"))
        for part in range(passes):
            both: Any = compression or called
            with both.no_sync() if part + 1 < passes else contextlib.nullcontext():
                how = case.get("checkpoint", "") if method else ""
                called(data(10 * step + part), branch(step + part, case.get("by rank", False)), how).backward()
        if not case.get("sparse"):
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
    if compression:
        assert compression.stats()["steps"] == STEPS and compression.stats()["verified"] == STEPS
        compression.close()
    return [parameter.detach().clone() for parameter in model.parameters()], norms


WAYS: dict[str, dict[str, Any]] = {
    "unused": {},
    "unused on some ranks": {"by rank": True},
    "gradients that are kept": {"by rank": True, "keep_grads": True},
    "accumulation": {"by rank": True, "passes": 3},
    "sparse": {"sparse": True, "by rank": True},
    "checkpoints": {"by rank": True, "checkpoint": "not reentrant"},
}


def way(case: dict[str, Any]) -> dict[str, Any]:
    """Return how far this ends from DDP alone, which begins with other weights on rank 1, and what all ranks share."""
    (alone, norms), (ours, found) = train(None, case), train("none", case)
    moved = max(float((a - b.detach()).abs().max()) for a, b in zip(ours, Forked().parameters(), strict=True))
    far = [float((a - b).abs().max()) for a, b in zip(alone, ours, strict=True)]
    far += [abs(a - b) for a, b in zip(norms, found, strict=True)]
    return {"far": max(far), "moved": moved, "weights": digest(ours), "compressed": digest(train("topk", case)[0])}


def alike() -> list[str]:
    """Return what this rank begins with: weights and buffers in memory of every kind."""
    torch.manual_seed(rank())
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(4), nn.Linear(2, 2))
    model[1].running_mean.fill_(rank())
    model[1].num_batches_tracked.fill_(rank())
    model[2].requires_grad_(False)
    before = digest([*model.parameters(), *model.buffers()])
    compression = hvc.Compression.none(model.named_parameters(), timeout=LONG)
    compression.register(model)
    compression.close()
    return [before, digest([*model.parameters(), *model.buffers()])]


class Laid(nn.Module):
    """Weights that lie otherwise than they are numbered: in the format ``channels_last``, and transposed."""

    def __init__(self, *, contiguous: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        conv, linear = nn.Conv2d(6, 8, 3), nn.Linear(12, 20, bias=False)
        if not contiguous:
            conv = conv.to(memory_format=torch.channels_last)
            linear.weight = nn.Parameter(linear.weight.detach().t().contiguous().t())
        self.conv, self.linear = conv, linear

    def forward(self, step: int) -> Tensor:
        seed = torch.Generator().manual_seed(10 * step + rank())
        sizes = torch.logspace(-2, 1, 12)  # elements that are not like each other
        image, given = torch.randn(4, 6, 5, 5, generator=seed), torch.randn(9, 12, generator=seed) * sizes
        image = image * sizes[:6].view(1, 6, 1, 1)
        return self.conv(image).square().mean() + (self.linear(given) - 1).square().mean()


def laid(method: Any, *, wrapped: bool, contiguous: bool) -> list[Any]:
    """Return the digest of a training, and how many of the weights that were pruned are 0 no longer."""
    model = Laid(contiguous=contiguous)
    with torch.no_grad():
        model.conv.weight[:, ::2] = 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compression = hvc.Compression.create(method, model.named_parameters(), schedule="single", timeout=LONG)
    call = DistributedDataParallel(model) if wrapped else model
    compression.register(call, optimizer, warmup_steps=2)
    for step in range(6):
        optimizer.zero_grad()
        call(step).backward()
        optimizer.step()
    compression.close()
    return [digest(model.parameters()), int(model.conv.weight[:, ::2].count_nonzero())]


def laid_anew(when: str, kernel: int = 3, **options: bool) -> str:
    """Return what is said where the format of the weights changes behind the wrapper."""
    torch.manual_seed(5)
    model = nn.Conv2d(6, 8, kernel)
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=LONG)
    call = DistributedDataParallel(model, **options)
    if when == "before it is registered":
        model.to(memory_format=torch.channels_last)
    compression.register(call)

    def train() -> None:
        for step in range(3):
            if when == f"before step {step}":
                model.to(memory_format=torch.channels_last)
            given = torch.randn(2, 6, 5, 5, generator=torch.Generator().manual_seed(step))
            (
                call(given).square().mean() * (0.0 if step == 0 and options.get("find_unused_parameters") else 1.0)
            ).backward()

    try:
        return refused(train)
    finally:
        compression.close()


def laid_with_gaps(views: bool) -> str:
    """Return what is said of a weight that torch's buckets hold without the gaps that it has."""
    torch.manual_seed(5)
    model = nn.Linear(6, 8, bias=False)
    model.weight = nn.Parameter(torch.randn(8, 12)[:, ::2])
    model.none = nn.Parameter(torch.zeros(0, 5))  # two dimensions, and no element
    compression = hvc.Compression.marsit(model.named_parameters(), timeout=LONG)
    call = DistributedDataParallel(model, gradient_as_bucket_view=views)
    compression.register(call)
    try:
        return refused(
            lambda: [(call(torch.randn(4, 6)).square().mean() + model.none.sum()).backward() for _ in range(3)]
        )
    finally:
        compression.close()


def dropped(
    way: str,
    uses: Callable[[int], bool],
    method: str = "topk",
    *,
    passes: int = 1,
    clears: bool = True,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    """Return whether results are handed back as they are, and what is said, where steps do not use all exchanges."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compression = hvc.Compression.create(method, model.named_parameters(), verify_every=0, timeout=LONG)
    views = way == "views"
    call = model if way == "plain" else DistributedDataParallel(model, gradient_as_bucket_view=views)
    with told() as texts:
        compression.register(call, optimizer)
        for step in range(30):  # ranks vote in steps that measure
            if clears:
                optimizer.zero_grad()
            for number in range(passes):
                with compression.no_sync() if number + 1 < passes else contextlib.nullcontext():
                    seed = torch.Generator().manual_seed(10 * step + rank())
                    call(torch.randn(4, 6, generator=seed).to(dtype)).square().mean().backward()
            if uses(step):
                optimizer.step()
        off = compression._here().reducer.norms.ratio.off
        compression.close()
    return [off, sum("several times for one step" in text for text in texts), sum("were dropped" in t for t in texts)]


def half(step: int) -> bool:
    return step % 2 == 0


def always(step: int) -> bool:
    return True


def scaled() -> list[float]:
    """Return by how much the residuals changed when the scale was halved."""
    model = nn.Linear(12, 4)
    compression = hvc.Compression.ef_signsgd(model.named_parameters(), timeout=LONG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    compression.register(model, optimizer)
    scaler = compression.follow(torch.amp.GradScaler("cpu", init_scale=64.0))
    found = []
    for step in range(3):
        optimizer.zero_grad()
        given = torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * step + rank()))
        loss = model(given).square().mean() * (float("nan") if step == 1 and ODD else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = compression.stats()["residual_norm"]
        scaler.update()
        found.append(round(compression.stats()["residual_norm"] / before, 4))
    compression.close()
    return found


def two_models() -> list[list[float]]:
    """Return gradients of two models in one pass, whose modules come in another order on each rank, and not all."""
    models = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    made = [hvc.Compression.none(model.named_parameters(), timeout=LONG) for model in models]
    for model, compression in zip(models, made, strict=True):
        compression.register(model)
    outputs = [model[rank()](torch.ones(1, 2)).sum() for model in (reversed(models) if ODD else models)]
    sum(outputs).backward()  # type: ignore[union-attr]
    for compression in made:
        compression.close()
    return [layer.weight.grad.view(-1).tolist() for model in models for layer in model]


def averaged(*, static_graph: bool) -> None:
    model = nn.Linear(2, 2)
    compression = hvc.Compression.none(model.named_parameters(), timeout=LONG)
    compression.register(model)
    wrapped = DistributedDataParallel(model, static_graph=static_graph)
    try:
        wrapped(torch.ones(1, 2)).sum().backward()
    finally:
        compression.close()


def divided(group: Any = None) -> None:
    model = nn.Linear(2, 2)
    fully_shard(model)
    compression = hvc.Compression.none(model.named_parameters(), process_group=group, timeout=LONG)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvc.DistributedUpdateOptimizer(optimizer, model.named_parameters(), compression)
    finally:
        compression.close()


def ignored(method: str, *kinds: Any, again: bool = False, **own: Any) -> list[str]:
    """Return what a rank tells of exact rounds, where each layer has an optimizer of its own."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in kinds))
    optimizers = [kind(layer.parameters(), lr=0.1) for kind, layer in zip(kinds, model, strict=True)]
    compression = hvc.Compression.create(method, model.named_parameters(), timeout=LONG, **own)
    with told() as texts:
        if again:
            compression.attach(*optimizers, warmup_steps=5)
        compression.register(model, optimizers, warmup_steps=5)
    compression.close()
    return [text for text in texts if text.startswith("ignored")]


def mismatch() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False, track_running_stats=ODD))
    compression = hvc.Compression.none(model.named_parameters(), timeout=LONG)
    try:
        compression.register(model)
    finally:
        compression.close()


def small() -> tuple[nn.Sequential, hvc.Compression]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    compression = hvc.Compression.none(model.named_parameters(), timeout=LONG)
    return model, compression


def interrupted() -> None:
    """An error ends the pass of one rank, which goes on with the next batch."""
    model, compression = small()
    compression.register(model)
    fails = [ODD]

    def fail(grad: Tensor) -> None:
        if fails.pop():
            fails.append(False)
            raise RuntimeError("no luck")

    model[0].weight.register_hook(fail)
    try:
        if ODD:
            with contextlib.suppress(RuntimeError):
                model(torch.ones(1, 2)).sum().backward()
        model(torch.ones(1, 2)).sum().backward()
    finally:
        compression.close()


def stepped(before: bool, emptied: bool) -> str:
    """Optimizers step in hooks of the backward pass, which come before ours or after them; or gradients are taken."""
    model, compression = small()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        if emptied:
            parameter.grad = None
        else:
            optimizers[parameter].step()

    def hooks() -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)

    if before:
        hooks()
    compression.register(model)
    if not before:
        hooks()
    try:
        return refused(lambda: model(torch.ones(1, 2)).sum().backward())
    finally:
        compression.close()


def cut_off() -> list[str]:
    """Something ends the wait for results on every rank, and training goes on."""
    model, compression = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression.register(model, optimizer)
    session, stock = compression._here(), compression._here().reducer.result

    def result(*given: object) -> None:
        session.reducer.result = stock
        raise KeyboardInterrupt

    session.reducer.result = result
    with contextlib.suppress(KeyboardInterrupt):
        model(torch.ones(1, 2)).sum().backward()
    try:
        return [refused(optimizer.step), refused(lambda: model(torch.ones(1, 2)).sum().backward())]
    finally:
        compression.close()


def frozen() -> list[Any]:
    """What a rank has accumulated is no longer there when a parameter is frozen before the exchange."""
    model, compression = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compression.register(model, optimizer)
    before = model[0].weight.detach().clone()
    with compression.no_sync():
        model(torch.full((1, 2), 1.0 + ODD)).sum().backward()
    model[0].weight.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    found = [bool((model[0].weight == before).all()), model[0].weight.grad is None]
    # The control: what was exchanged before stays, as a step that is still to come has it.
    model[0].weight.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    exchanged = model[0].weight.grad.clone()
    model[0].weight.requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    compression.close()
    return [*found, bool((model[0].weight.grad == exchanged).all()), *map(frozen_beside_zeros, (False, True))]


def frozen_beside_zeros(wrapped: bool) -> bool:
    """Return whether a frozen parameter rests where a program clears gradients in place, and momentum would move it."""
    model, compression = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    called = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True) if wrapped else model
    compression.register(called, optimizer)
    weights = []
    for step in range(6):
        optimizer.zero_grad(set_to_none=False)
        called(torch.full((1, 2), 1.0 + ODD)).sum().backward()
        optimizer.step()
        model[0].weight.requires_grad_(step < 2)
        weights.append(model[0].weight.detach().clone())
    compression.close()
    assert not torch.equal(weights[1], weights[2])
    return torch.equal(weights[2], weights[-1])


def strangers() -> list[list[str]]:
    """Return what is said of parameters of an optimizer that no compression exchanges, and of two that do."""
    return [strangers_told(way) for way in ("added", "more", "two")]


def strangers_told(way: str) -> list[str]:
    first, second = nn.Linear(2, 3), nn.Linear(3, 1)
    given = [first, second] if way == "two" else [first]
    moved = [first] if way == "added" else [first, second]
    with told() as texts:
        optimizer = torch.optim.SGD([p for model in moved for p in model.parameters()], lr=0.1)
        compressions = [hvc.Compression.none(model.named_parameters(), timeout=20.0) for model in given]
        for compression, model in zip(compressions, given, strict=True):
            compression.register(model, optimizer)
        for step in range(3):
            if way == "added" and step == 1:
                optimizer.add_param_group({"params": second.parameters()})
            optimizer.zero_grad()
            second(first(torch.full((1, 2), 1.0 + ODD))).sum().backward()
            optimizer.step()
        for compression in compressions:
            compression.close()
    return texts


def replaced(way: str) -> list[str]:
    """Return what is said where a layer is replaced while a module is trained, and another optimizer trains on.

    Args:
        way: "late" has the new layer's first gradient come a step later; "exchanged" gives it a compression of its
            own; "other" leaves the module as it is, and trains that layer beside it.
    """
    model, beside = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nn.Linear(3, 1)
    with told() as texts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compressions = [hvc.Compression.none(model.named_parameters(), timeout=20.0)]
        compressions[0].register(model, optimizer)
        for step in range(6):
            if step == 2:
                if way != "other":
                    model[1] = beside
                if way == "exchanged":
                    compressions.append(hvc.Compression.none(beside.named_parameters(), timeout=20.0))
                    compressions[1].register(beside)
                optimizer = torch.optim.SGD(
                    [*model.parameters(), *(beside.parameters() if way == "other" else ())], 0.1
                )
            optimizer.zero_grad()
            first = model[0](torch.full((1, 2), 1.0 + ODD))
            value = first.sum() if way == "late" and step == 2 else model[1](first).sum()
            (value + beside(first).sum() if way == "other" else value).backward()
            optimizer.step()
        for compression in compressions:
            compression.close()
    return texts


report(
    {
        "strangers": strangers(),
        "replaced": [replaced(way) for way in ("at once", "late", "exchanged", "other")],
        "stepped": [stepped(before, emptied) for before in (False, True) for emptied in (False, True)],
        "cut off": cut_off(),
        "frozen": frozen(),
        "ways": {name: way(case) for name, case in WAYS.items()},
        "alike": alike(),
        "laid": [
            [laid(method, wrapped=wrapped, contiguous=contiguous) for wrapped in (False, True)]
            for method in ("marsit", hvc.masked("marsit"))
            for contiguous in (False, True)
        ],
        "laid anew": {
            f"{when} {options}": laid_anew(when, **options)
            for when, options in (
                ("before it is registered", {}),
                ("before it is registered", {"gradient_as_bucket_view": True}),
                ("before it is registered", {"find_unused_parameters": True}),
                ("before step 0", {}),
                ("before step 2", {"gradient_as_bucket_view": True}),
            )
        },
        "laid alike": [laid_anew("before step 1", kernel=1), *(laid_with_gaps(views) for views in (False, True))],
        "dropped": {
            way: [
                dropped(way, always),
                dropped(way, half),
                dropped(way, half, passes=2),
                dropped(way, half, clears=False),
            ]
            for way in ("plain", "wrapped", "views")
        },
        "dropped in 16 bits": [dropped("plain", half, dtype=torch.float16)],
        "dropped by methods that keep nothing": [dropped("plain", half, method) for method in ("none", "qsgd")],
        "scaled": scaled(),
        "two models": two_models(),
        "mismatch": refused(mismatch),
        "interrupted": refused(interrupted),
        "ignored": [
            ignored("marsit", torch.optim.AdamW, torch.optim.SGD),
            ignored("marsit", torch.optim.SGD),
            ignored("marsit", torch.optim.SGD, again=True),
            ignored("fp16", torch.optim.AdamW),
            ignored("marsit", torch.optim.SGD, warmup_steps=3),
        ],
        "divided": [refused(divided), refused(partial(divided, [dist.new_group([r]) for r in range(2)][rank()]))],
        "averaged": [refused(partial(averaged, static_graph=static)) for static in (False, True)],
    }
)
dist.destroy_process_group()
