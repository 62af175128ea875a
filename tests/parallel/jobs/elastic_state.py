"""An elastic state that has a compression, and what it does without a change of ranks: commits, syncs, restores."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic import state as stock
from torch import nn

import horovod_compress.torch as hvc
from horovod_compress.errors import ConfigError
from horovod_compress.fronts.horovod import elastic
from tests.support.nets import digest
from tests.support.rank import check
from tests.support.training import net

#: Elements of what is committed, 4 bytes each: more than the allocator keeps for itself when it is freed.
ELEMENTS = 1 << 24
NOTHING: dict[str, Any] = {}
#: Methods with optimizers of which a second moment is held, or whose first steps are exact, among several ranks.
METHODS: list[tuple[str, Any, dict[str, Any]]] = [
    ("topk", torch.optim.SGD, {}), ("onebit", torch.optim.SGD, {"momentum": 0.9}), ("signum", torch.optim.SGD, {}),
    ("powersgd", torch.optim.SGD, {}), ("marsit", torch.optim.AdamW, {}), ("qsgd", torch.optim.Adam, {}),
    ("onebit_adam", torch.optim.Adam, {"eps": 0.0}),
]  # fmt: skip

hvd.init()


def trained(
    model: nn.Module, method: str = "topk", plain: Any = None, attach: dict[str, Any] | None = NOTHING, **options: Any
) -> tuple[Any, Any]:
    """Return a compression and its optimizer, SGD unless another one is given.

    Args:
        attach: options; None for tokens.
    """
    named = list(model.named_parameters())
    compression = hvc.Compression.create(method, named, timeout=30.0, **options)
    plain = plain or torch.optim.SGD(model.parameters(), lr=0.1)
    os.environ["HOROVOD_ELASTIC"] = "1"  # the optimizer then hands gradients over with one rank, too
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, compression=compression)
    del os.environ["HOROVOD_ELASTIC"]
    if attach is not None:
        compression.attach(optimizer, **attach)
    return compression, optimizer


def backward(model: nn.Module, parameters: int) -> None:
    sum(p.sum() for p in list(model.parameters())[-parameters:]).backward()


def restored_in_a_step() -> float:
    """Restore a state, whose names have the optimizer before the compression, in the middle of a backward pass."""
    model = net(seed=1)
    compression, optimizer = trained(model)
    state = hvd.elastic.TorchState(a=optimizer, b=model, c=compression)
    state.sync()
    before = sum(float(p.sum()) for p in model.parameters())
    backward(model, 99)
    optimizer.step()
    backward(model, 1)
    assert compression._here().under_way == 1
    state.restore()
    return sum(float(p.sum()) for p in model.parameters()) - before


def like_torch_alone() -> list[str]:
    """Return what one rank trains otherwise than torch alone does, after some steps with each method."""
    found = []
    for method, kind, options in METHODS:
        ends = []
        for way in ("alone", "stock", "attached"):
            model = net(seed=1)
            optimizer: Any = kind(model.parameters(), lr=0.1, **options)
            if way != "alone":
                compression, optimizer = trained(model, method, optimizer, NOTHING if way == "attached" else None)
            for step in range(6):
                optimizer.zero_grad()
                sum((p * (step - p).sin()).sum() for p in model.parameters()).backward()
                optimizer.step()
            if way != "alone":
                assert compression.stats()["steps"] == 6
                compression.close()
            ends.append(digest(model.parameters()))
        found += [method] if len(set(ends)) > 1 else []
    return found


def given_to_no_state() -> str:
    compression, _ = trained(net(seed=1))
    try:
        stock._get_handler(compression)
    except ConfigError as error:
        return str(error)
    return ""


def local_steps() -> list[str | None]:
    """Return what an update-mode optimizer says of its last step, before and after a commit, and when it was saved."""
    model = net(seed=1)
    named = list(model.named_parameters())
    compression = hvc.Compression.topk(named, timeout=30.0)
    optimizer: Any = hvc.DistributedUpdateOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, compression, 2)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)
    state.sync()
    backward(model, 99)
    optimizer.step()
    found = [optimizer._updates.unfinished()]
    elastic.UpdateModeHandler(optimizer)
    found.append(optimizer._updates.unfinished())
    state.commit()
    found.append(optimizer._updates.unfinished())
    optimizer.state_dict()
    return [*found, optimizer._updates.unfinished()]


def joined() -> list[list[float]]:
    """Return the momentum with which the last rank joins the others, after a step, and after it has gone back."""
    model = net(seed=1)
    named = list(model.named_parameters())
    compression = hvc.Compression.topk(named, timeout=30.0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer: Any = hvc.DistributedUpdateOptimizer(sgd, named, compression, 2)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)
    state.sync()

    def stepped(factor: float) -> list[float]:
        sum(factor * p.sum() for p in model.parameters()).backward()
        optimizer.step()
        return momenta()

    def momenta() -> list[float]:
        return [float(kept["momentum_buffer"].sum()) for kept in optimizer.state.values()]

    stepped(1.0 + hvd.rank())
    handler = state._handlers["optimizer"]
    handler._member = hvd.rank() == 0
    handler.sync()
    found = [momenta(), stepped(1.0)]
    if hvd.rank():
        handler.restore()
    return [*found, momenta()]


def joins_behind_an_unused_exchange() -> list[Any]:
    """Let the last rank join where no optimizer has used the last exact round; return how a next step goes."""
    model = net(seed=1)
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    compression, optimizer = trained(model, "marsit", adam, {"warmup_steps": 1, "match_norm": False})
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, compression=compression)
    for uses in (True, False):
        optimizer.zero_grad()
        backward(model, 99)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step() if uses else None
    before = digest(model.parameters())
    if hvd.rank():
        optimizer.state.clear()
        optimizer._synchronized = False
    state.sync()  # the optimizer of the one that joins makes a step without gradients
    found: list[Any] = [digest(model.parameters()) == before]
    for _ in range(2):
        optimizer.zero_grad()
        backward(model, 99)
        optimizer.step()
        found.append(digest(model.parameters()))
    return found


def follows_later() -> list[float]:
    """Return the scales of a scaler that only rank 0 follows when ranks meet, and the others after that."""
    model = net(seed=1)
    compression, _ = trained(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + hvd.rank()))
    scaler.scale(torch.ones(1))
    if hvd.rank() == 0:
        compression.follow(scaler)
    state = hvd.elastic.TorchState(model=model, compression=compression)
    state.sync()
    if hvd.rank():
        compression.follow(scaler)
    return [scaler.get_scale(), compression._here().steps.scale.followed() or 0.0]


def scalers() -> list[dict[str, Any]]:
    """Return the state of a scaler that is another one on each rank: after a sync, a commit and a step, a restore."""
    model = net(seed=1)
    compression, _ = trained(model)
    scaler = compression.follow(torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + hvd.rank()), growth_interval=7))
    scaler.scale(torch.ones(1))
    state = hvd.elastic.TorchState(model=model, compression=compression)
    state.sync()
    found = [scaler.state_dict() | {"followed": compression._here().steps.scale.followed()}]
    state.commit()
    scaler.update(8.0)
    found.append(scaler.state_dict())
    state.restore()
    return [*found, scaler.state_dict()]


def failed_commits() -> list[Any]:
    """Let commits fail in another handler, then in the copy; return what is left, what a restore says, and a step."""
    model = net(seed=1)
    compression, _ = trained(model)
    state = hvd.elastic.TorchState(model=model, compression=compression)
    state.sync()
    resets = compression._resets

    def fail(*given: Any) -> None:
        raise MemoryError

    state._handlers["model"].save = fail
    handlers, state._handlers = state._handlers, dict(reversed(state._handlers.items()))  # the model's first
    with contextlib.suppress(MemoryError):
        state.commit()
    found = [resets._coming]
    state._handlers, resets._copied = handlers, fail
    del state._handlers["model"].save
    with contextlib.suppress(MemoryError):
        state.commit()
    try:
        state.restore()
    except ConfigError as error:
        found.append(str(error))
    del resets._copied
    state.sync()
    state.commit()
    state.restore()
    return [*found, resets._before["step"]]


def peak_of_a_commit() -> float:
    """Return how much memory a commit takes beside the copy of the last one, as a share of such a copy."""
    model = nn.Linear(1, ELEMENTS, bias=False)
    compression, _ = trained(model, min_elements=0)
    state = hvd.elastic.TorchState(compression=compression)
    state.commit()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present use from now on
    before = _status("VmRSS")
    state.commit()
    return (_status("VmHWM") - before) / (4 * ELEMENTS)


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


ALONE: list[Callable[[], Any]] = [
    restored_in_a_step,
    like_torch_alone,
    given_to_no_state,
    failed_commits,
    peak_of_a_commit,
]
TOGETHER: list[Callable[[], Any]] = [local_steps, joined, scalers, joins_behind_an_unused_exchange, follows_later]
for case in ALONE if hvd.size() == 1 else TOGETHER:
    check(case.__name__, case)
