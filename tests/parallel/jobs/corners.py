"""Rare ways of use: what each has in common is that a step begins, ends or resumes unusually."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import horovod_compress.torch as hvc
from horovod_compress.schedule.plan import Plan
from tests.support.logs import told
from tests.support.rank import check, refusal
from tests.support.states import resealed
from tests.support.training import (
    Words,
    digest,
    farthest,
    gathered,
    loss_of,
    net,
    optimizer_for,
    train,
    weights,
    word_loss,
)

hvd.init()
torch.set_num_threads(1)
RANK = hvd.rank()
PATHS = (False, True)


def against_horovod(play: Callable[[str | None, bool], list[Tensor]]) -> list[float]:
    """Return how far both paths of "none" are from Horovod alone."""
    alone = play(None, False)
    return [farthest(alone, play("none", attach)) for attach in PATHS]


def filled_by_hand(method: str | None, attach: bool) -> list[Tensor]:
    """Gradients that no backward hook sees, written into the same memory in every step."""
    model = net()
    optimizer, compression = optimizer_for(model, method, attach)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for step in range(4):
        for parameter, grad in zip(parameters, torch.autograd.grad(loss_of(model, step), parameters), strict=True):
            parameter.grad.copy_(grad)
        optimizer.step()
    if compression:
        assert compression.stats()["steps"] == 4
        compression.close()
    return weights(model)


check("filled by hand", lambda: against_horovod(filled_by_hand))


def odd_last_batch(method: str | None, attach: bool) -> list[Tensor]:
    """Two backward passes a step, but one in the last; gradients are kept between steps."""
    model = net()
    optimizer, compression = optimizer_for(model, method, attach, backward_passes_per_step=2)
    for step, passes in enumerate((2, 2, 1)):
        model.zero_grad(set_to_none=False)
        for number in range(passes):
            loss_of(model, 10 * step + number).backward()
        optimizer.step()
    if compression:
        assert compression.stats()["steps"] == 3
        compression.close()
    return weights(model)


check("odd last batch", lambda: against_horovod(odd_last_batch))


def sparse_alone(method: str | None, attach: bool) -> list[Tensor]:
    model = Words()
    options = {"schedule": "layerwise"} if method else {}
    optimizer, compression = optimizer_for(model, method, attach, **options)
    for step in range(8):
        optimizer.zero_grad()
        word_loss(model, step).backward()
        optimizer.step()
    if compression:
        compression.close()
    return weights(model)


check("sparse alone", lambda: against_horovod(sparse_alone))


def back_one_step(attach: bool) -> bool:
    """Load the state before the last step and take it again: the same weights."""
    model = Words()
    optimizer, compression = optimizer_for(model, "marsit", attach, full_precision_every=3)

    def one(step: int) -> None:
        optimizer.zero_grad()
        word_loss(model, step).backward()
        optimizer.step()

    one(0)
    kept = [value.clone() for value in weights(model)], compression.state_dict(), optimizer.state_dict()
    kept_momentum = [s["momentum_buffer"].clone() for s in kept[2]["state"].values()]
    one(1)
    first = digest(weights(model))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), kept[0], strict=True):
            parameter.copy_(value)
    for state, momentum in zip(optimizer.state.values(), kept_momentum, strict=True):
        state["momentum_buffer"].copy_(momentum)
    compression.load_state_dict(kept[1])
    one(1)
    compression.close()
    return digest(weights(model)) == first


check("back one step", lambda: [back_one_step(attach) for attach in PATHS])


def after_nan(attach: bool) -> dict[str, Any]:
    model = net()
    optimizer, compression = optimizer_for(model, "marsit", attach, nonfinite="raise", schedule="layerwise")
    texts = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, step) * (float("nan") if step == 1 and RANK == 0 else 1.0)
        loss.backward()
        texts.append(refusal(optimizer.step))
    compression.close()
    return {"texts": texts, "ranks": gathered(digest(weights(model)))}


check("after NaN", lambda: [after_nan(attach) for attach in PATHS])


def after_close() -> str:
    model = net()
    _, compression = optimizer_for(model, "none", True)
    compression.close()
    return refusal(lambda: loss_of(model, 0).backward())


check("after close", after_close)


def in_a_step() -> list[str]:
    model = net()
    optimizer, compression = optimizer_for(model, "none", True)
    loss_of(model, 0).backward()
    found = [refusal(compression.state_dict)]
    optimizer.step()
    found.append(refusal(compression.state_dict))
    hvd.barrier()
    compression.close()
    return found


check("in a step", in_a_step)


def largest() -> str:
    model = net()
    optimizer, compression = optimizer_for(model, "none", False, op=hvd.Max)
    loss_of(model, 0).backward()
    text = refusal(optimizer.step)
    hvd.barrier()
    compression.close()
    return text


check("op Max", largest)


def one_rank_resumes() -> str:
    """Last, as it ends in a failed state."""
    model = net()
    optimizer, compression = optimizer_for(model, "none", True, timeout=20.0)
    if RANK == 1:
        compression.load_state_dict(resealed(compression.state_dict() | {"step": 7}))
    loss_of(model, 0).backward()
    text = refusal(optimizer.step)
    compression.close()
    return text


check("one rank resumes", one_rank_resumes)


def one_rank_has_other_buckets() -> str:
    """As a checkpoint of another schedule would leave them."""
    model = net()
    optimizer, compression = optimizer_for(model, "none", True, timeout=20.0)
    if RANK == 1:
        reducer = compression._session.reducer
        tensors = [tensor for bucket in reducer.plan.buckets for tensor in bucket.tensors]
        reducer.replan(Plan.of([([tensor], 1) for tensor in tensors]))
        compression.load_state_dict(compression.state_dict())
    loss_of(model, 0).backward()
    text = refusal(optimizer.step)
    compression.close()
    return text


check("one rank has other buckets", one_rank_has_other_buckets)


def rolled_back(attach: bool) -> list[Any]:
    """Load an optimizer's state between backward and step; return what the next steps are like."""
    model = net()
    optimizer, compression = optimizer_for(model, "topk", attach)
    train(model, optimizer, range(2))
    before = optimizer.state_dict()
    loss_of(model, 2).backward()
    optimizer.load_state_dict(before)
    train(model, optimizer, range(3, 5))
    first = next(iter(model.parameters())).requires_grad_(False)
    rested = first.clone()
    train(model, optimizer, range(5, 7))
    found = [torch.equal(first, rested), refusal(compression.state_dict)]
    compression.close()
    return [*found, len(set(gathered(digest(model.parameters()))))]


check("rolled back", lambda: [rolled_back(attach) for attach in PATHS])


def copied(attach: bool) -> list[Any]:
    """Copy a compression, alone and with its optimizer, in the ways in which frameworks do; the first goes on."""
    model = net()
    optimizer, compression = optimizer_for(model, "marsit", attach)
    train(model, optimizer, range(1))
    with told() as texts:
        copies = [copy.deepcopy(compression), pickle.loads(pickle.dumps(compression))]
    found = [refusal(lambda copied=copied: copied.compress(torch.zeros(1))) for copied in copies]
    train(model, optimizer, range(1, 3))
    compression.close()
    return [found, texts]


check("copied", lambda: [copied(attach) for attach in PATHS])


def rolled_back_in_the_middle(attach: bool) -> tuple[str, float]:
    """Load an optimizer's state after a backward pass that has not reached every parameter."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer, compression = optimizer_for(model, "none", attach)
    before = optimizer.state_dict()
    model[0](torch.ones(1, 4)).sum().backward()
    began = time.monotonic()
    text = refusal(lambda: optimizer.load_state_dict(before))
    seconds = time.monotonic() - began
    optimizer.synchronize()  # as the message says
    with optimizer.skip_synchronize():
        optimizer.step()
    optimizer.load_state_dict(before)
    compression.close()
    return text, seconds


check("rolled back in the middle", lambda: [rolled_back_in_the_middle(attach) for attach in PATHS])


def step_left_out(attach: bool) -> float:
    """Leave out the step after synchronize(), then synchronize in the middle of an accumulation."""
    weight = nn.Parameter(torch.zeros(4))
    compression = hvc.Compression.none([("weight", weight)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], 0.1),
        named_parameters=[("weight", weight)],
        compression=compression,
        backward_passes_per_step=2,
    )
    if attach:
        compression.attach(optimizer)
    for _ in range(2):
        (weight.sum() * (RANK + 1)).backward()
    optimizer.synchronize()
    optimizer.zero_grad()
    (weight.sum() * (RANK + 1)).backward()
    optimizer.synchronize()
    compression.close()
    return weight.grad[0].item()


check("step left out", lambda: [step_left_out(attach) for attach in PATHS])


def closure(attach: bool) -> str:
    model = net()
    optimizer, compression = optimizer_for(model, "none", attach)
    said = refusal(lambda: optimizer.step(lambda: loss_of(model, 0).backward()))
    compression.close()
    return said


check("closure", lambda: [closure(attach) for attach in PATHS])


def unfrozen_later(attach: bool) -> int:
    """Return how many warnings come where a parameter needs a gradient that was frozen at first."""
    model = net()
    late = next(iter(model.parameters())).requires_grad_(False)
    optimizer, compression = optimizer_for(model, "none", attach)
    with told() as warnings:
        train(model, optimizer, [0])
        assert not warnings
        late.requires_grad_(True)
        train(model, optimizer, range(1, 3))
    compression.close()
    return sum("is never reduced" in text for text in warnings)


check("unfrozen later", lambda: [unfrozen_later(attach) for attach in PATHS])


def unfrozen_in_updates() -> str:
    model = net()
    late = next(iter(model.parameters())).requires_grad_(False)
    compression = hvc.Compression.none(model.named_parameters())
    optimizer = hvc.DistributedUpdateOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), compression
    )
    train(model, optimizer, [0])
    late.requires_grad_(True)
    said = refusal(lambda: train(model, optimizer, [1]))
    compression.close()
    return said


check("unfrozen in updates", unfrozen_in_updates)


def other_mode(saved_in: str) -> list[str]:
    """Load what was saved in one mode into both."""

    def make(mode: str) -> tuple[nn.Module, Any, Any]:
        model = net()
        if mode == "gradients":
            return model, *optimizer_for(model, "topk", True)
        compression = hvc.Compression.topk(model.named_parameters())
        local = torch.optim.SGD(model.parameters(), 0.1)
        return model, hvc.DistributedUpdateOptimizer(local, model.named_parameters(), compression), compression

    model, optimizer, compression = make(saved_in)
    train(model, optimizer, range(2))
    state = compression.state_dict()
    compression.close()
    said = []
    for mode in ("gradients", "updates"):
        _, _, other = make(mode)
        said += [refusal(lambda: other.load_state_dict(state)), refusal(lambda: other.load_state_dict(state, "reset"))]
        other.close()
    return said


check("other mode", lambda: [other_mode(mode) for mode in ("gradients", "updates")])


def exact_rounds(exchanges: int) -> list[int]:
    """Return the optimizer's steps in which a held second moment moves, with several exchanges for each."""
    model = net()
    compression = hvc.Compression.topk(model.named_parameters(), density=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), 1e-3), named_parameters=model.named_parameters(), compression=compression
    )
    compression.attach(optimizer, warmup_steps=4, rebuild_every=6)
    moved, held = [], compression._session.steps.held
    for step in range(16):
        before = {name: one.moment.clone() for name, one in held._held.items()}
        for number in range(exchanges):
            optimizer.zero_grad()
            loss_of(model, 10 * step + number).backward()
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        if any(not torch.equal(one.moment, before[name]) for name, one in held._held.items() if name in before):
            moved.append(step)
    compression.close()
    return moved


check("exact rounds", lambda: [exact_rounds(exchanges) for exchanges in (1, 2)])


def scale_kept() -> list[float]:
    model = net()
    optimizer, compression = optimizer_for(model, "topk", True)
    scaler = compression.follow(torch.amp.GradScaler("cpu", init_scale=8.0))
    scaler.scale(loss_of(model, 0)).backward()
    optimizer.synchronize()
    state = compression.state_dict()
    compression.close()
    _, other = optimizer_for(net(), "topk", True)
    other.load_state_dict(state)
    again = other.state_dict()
    other.close()
    return [state["scale"], again["scale"]]


check("scale kept", scale_kept)


def scaler_too_soon(attach: bool) -> list[str]:
    model = net()
    optimizer, compression = optimizer_for(model, "none", attach)
    scaler = compression.follow(torch.amp.GradScaler("cpu", init_scale=8.0))
    scaler.scale(loss_of(model, 0)).backward()
    said = [refusal(lambda: scaler.unscale_(optimizer)), refusal(lambda: scaler.step(optimizer))]
    optimizer.synchronize()
    said.append(refusal(lambda: scaler.unscale_(optimizer)))
    with optimizer.skip_synchronize():
        said.append(refusal(lambda: scaler.step(optimizer)))
    compression.close()
    return said


check("scaler too soon", lambda: [scaler_too_soon(attach) for attach in PATHS])
