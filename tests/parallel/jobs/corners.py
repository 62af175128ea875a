"""Rare ways of use: what each has in common is that a step begins, ends or resumes unusually."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from horovod_compress.schedule.plan import Plan
from tests.support.rank import check
from tests.support.states import unsealed
from tests.support.training import digest, farthest, gathered, loss_of, net, optimizer_for, weights

hvd.init()
torch.set_num_threads(1)
RANK = hvd.rank()
PATHS = (False, True)


def against_horovod(play: Callable[[str | None, bool], list[Tensor]]) -> list[float]:
    """Return how far both paths of "none" are from Horovod alone."""
    alone = play(None, False)
    return [farthest(alone, play("none", attach)) for attach in PATHS]


def refused(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


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


class Words(nn.Module):
    """The embedding is the last in backward order, and alone in its bucket when layerwise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.out = nn.Embedding(50, 16, sparse=True), nn.Linear(16, 16)


def word_loss(model: nn.Module, step: int) -> Tensor:
    words = torch.randint(50, (20,), generator=torch.Generator().manual_seed(7 * step + RANK))
    return model.out(model.embedding(words)).square().mean()


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
        texts.append(refused(optimizer.step))
    compression.close()
    return {"texts": texts, "ranks": gathered(digest(weights(model)))}


check("after NaN", lambda: [after_nan(attach) for attach in PATHS])


def after_close() -> str:
    model = net()
    _, compression = optimizer_for(model, "none", True)
    compression.close()
    return refused(lambda: loss_of(model, 0).backward())


check("after close", after_close)


def in_a_step() -> list[str]:
    model = net()
    optimizer, compression = optimizer_for(model, "none", True)
    loss_of(model, 0).backward()
    found = [refused(compression.state_dict)]
    optimizer.step()
    found.append(refused(compression.state_dict))
    hvd.barrier()
    compression.close()
    return found


check("in a step", in_a_step)


def largest() -> str:
    model = net()
    optimizer, compression = optimizer_for(model, "none", False, op=hvd.Max)
    loss_of(model, 0).backward()
    text = refused(optimizer.step)
    hvd.barrier()
    compression.close()
    return text


check("op Max", largest)


def one_rank_resumes() -> str:
    """Last, as it ends in a failed state."""
    model = net()
    optimizer, compression = optimizer_for(model, "none", True, timeout=20.0)
    if RANK == 1:
        compression.load_state_dict(unsealed(compression.state_dict()) | {"step": 7})
    loss_of(model, 0).backward()
    text = refused(optimizer.step)
    compression.close()
    return text


check("one rank resumes", one_rank_resumes)


def one_rank_has_other_buckets() -> str:
    """As a checkpoint of another schedule would leave them."""
    model = net()
    optimizer, compression = optimizer_for(model, "none", True, timeout=20.0)
    if RANK == 1:
        reducer = compression._reducer
        tensors = [tensor for bucket in reducer.plan.buckets for tensor in bucket.tensors]
        reducer.replan(Plan.of([([tensor], 1) for tensor in tensors]))
        compression.load_state_dict(compression.state_dict())
    loss_of(model, 0).backward()
    text = refused(optimizer.step)
    compression.close()
    return text


check("one rank has other buckets", one_rank_has_other_buckets)
