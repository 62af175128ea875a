"""Parameters of divided models that are frozen after passes that were not reduced, or unfrozen; options by shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import horovod_compress.fsdp as hvc
from horovod_compress.fsdp import HorovodCompressError
from tests.support.rank import check, rank

dist.init_process_group("gloo")
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
WIDE = 12


def made(method: str, *, frozen: bool = False, rows: int = 10, **register: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDE, rows), nn.Tanh(), nn.Linear(rows, 2))
    model[0].requires_grad_(not frozen)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=MESH["shard"])
    fully_shard(model, mesh=MESH["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    compression = hvc.Compression.create(method, model.named_parameters(), timeout=30.0)
    compression.register(model, optimizer, replicate=MESH["replicate"], **register)
    return model, optimizer, compression


def backward(model: Any, step: int, *, reduced: bool = True) -> None:
    given = torch.randn(8, WIDE, generator=torch.Generator().manual_seed(100 * step + rank()))
    model.set_requires_gradient_sync(reduced)
    (model(given) - given[:, :2].sin()).square().mean().backward()
    model.set_requires_gradient_sync(True)


def drift(model: Any) -> float:
    """Return how far weights are from those of rank 0, over all of them and all ranks."""
    mine = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()])
    found: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return max(float((theirs - mine).abs().max()) for theirs in found)


def frozen_later(method: str) -> dict[str, Any]:
    """Freeze a layer of which torch keeps the whole gradient of an accumulation that was never ended."""
    model, optimizer, compression = made(method)
    weight, seen = model[0].weight, []
    for step in range(6):
        if step == 3:
            backward(model, 50, reduced=False)
            optimizer.zero_grad()
            model[0].requires_grad_(False)
        optimizer.zero_grad()
        before = weight.full_tensor().clone()
        backward(model, step)
        optimizer.step()
        seen.append(bool((weight.full_tensor() != before).any()))
    compression.close()
    return {"moved": seen, "drift": drift(model)}


def unfrozen(how: str) -> list[str]:
    """Train a layer that was frozen when the compression was created; then create another one.

    Args:
        how: of one row, so that a shard of it is empty; or what comes between the backward pass and the step.
    """
    model, optimizer, compression = made("topk", frozen=True, rows=1 if how == "one row" else 10)
    told = []
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        backward(model, step)
        other = None
        if step == 2 and how == "replaced":
            for one in model[0].parameters():
                one.grad = one.grad * 0.5
        if step == 2 and how == "frozen again":
            model[0].requires_grad_(False)
        if step == 2 and how == "registered in between":
            other = hvc.Compression.topk(model[0].named_parameters(), timeout=30.0)
            other.register(model[0], replicate=MESH["replicate"])
        try:
            optimizer.step()
        except HorovodCompressError as error:
            told.append(f"{step} {type(error).__name__}: {error}")
            compression.close()
            if other:
                other.close()
            model[0].requires_grad_(True)
            compression = hvc.Compression.topk(model.named_parameters(), timeout=30.0)
            compression.register(model, optimizer, replicate=MESH["replicate"])
    compression.close()
    return [*told, f"drift {drift(model)}"]


def unfrozen_elsewhere() -> float:
    """Train a layer that was frozen when one compression was created by another one, of this layer alone."""
    model, optimizer, compression = made("topk", frozen=True)
    for step in range(4):
        if step == 1:  # torch's get_state_dict() makes a step with gradients of zeros, where there is no state yet
            model[0].requires_grad_(True)
            fresh = torch.optim.AdamW(model.parameters(), lr=0.01)
            get_state_dict(model, fresh)
        if step == 2:
            other = hvc.Compression.topk(model[0].named_parameters(), timeout=30.0)
            other.register(model[0], replicate=MESH["replicate"])
        optimizer.zero_grad()
        backward(model, step)
        if step == 1:  # only to see what it would be: the next one is behind another register(), with no step between
            model[0].zero_grad()
            continue
        optimizer.step()
    compression.close()
    other.close()
    return drift(model)


def in_a_pipeline(method: str | None) -> str:
    """Train two stages of a schedule of torch's, each of which has two replicas; without a method, as the control."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("stage", "replicate", "shard"))
    torch.manual_seed(0)
    number = mesh["stage"].get_local_rank()
    stage = nn.Linear(WIDE, 2) if number else nn.Linear(WIDE, WIDE)
    fully_shard(stage, mesh=mesh["shard"] if method else mesh["replicate", "shard"])
    if method:
        made = hvc.Compression.create(method, stage.named_parameters(), timeout=30.0)
        made.register(stage, replicate=mesh["replicate"])
    schedule = ScheduleGPipe(
        PipelineStage(stage, number, 2, torch.device("cpu"), group=mesh["stage"].get_group()), 2, loss_fn=F.mse_loss
    )
    given = torch.ones(8, WIDE)
    try:
        if number:
            schedule.step(target=given[:, :2])
        else:
            schedule.step(given)
    except HorovodCompressError as error:
        return f"{type(error).__name__}: {error}"
    return "trained" if all(one.grad is not None for one in stage.parameters()) else "no gradients"


def options_by_shard() -> str:
    try:
        made("marsit", warmup_steps=3 + MESH["shard"].get_local_rank())
    except HorovodCompressError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


for each in ("none", "topk"):
    check(each, lambda: frozen_later(each))
for how in ("as it is", "one row", "replaced", "registered in between", "frozen again"):
    check(f"unfrozen, {how}", lambda: unfrozen(how))
check("unfrozen elsewhere", unfrozen_elsewhere)
check("pipelines", lambda: [in_a_pipeline(method) for method in (None, "none")])
check("options", options_by_shard)
