"""Adam with a second moment that is held, on the stock and on the attached path."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvc
from horovod_compress.engine.optimizer.adam import _Owed
from tests.support.rank import check
from tests.support.states import resealed
from tests.support.training import digest, farthest, gathered, loss_of, net, train

RANK, RATE = hvd.init() or hvd.rank(), 0.01
torch.set_num_threads(1)
FEW = {"second_moment": "shared", "warmup_steps": 4, "rebuild_every": 5}


def made(
    model: nn.Module, method: Any = "marsit", attach: dict[str, Any] | None = None, prefix: str = "", adam: Any = None
) -> tuple[Any, hvc.Compression]:
    """Return an optimizer around AdamW, and its compression.

    Args:
        attach: options of ``attach()``; None for the stock path.
        adam: another class of optimizer.
    """
    named = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
    compression = hvc.Compression.create(method, named, verify_every=1, timeout=20.0)
    inner = (adam or torch.optim.AdamW)(model.parameters(), lr=RATE)
    optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=compression)
    if attach is not None:
        compression.attach(optimizer, **attach)
    return optimizer, compression


def refused(attempt: Any) -> str:
    try:
        attempt()
    except hvc.HorovodCompressError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def paths() -> dict[str, Any]:
    """It is held on both paths, unless somebody asks for the optimizer's own; then it is another run."""
    found = {}
    for name, attach in (("stock", None), ("own", {"second_moment": "own"}), ("attached", {})):
        model = net()
        optimizer, compression = made(model, attach=attach)
        train(model, optimizer, range(36))
        found[name] = digest(model.parameters())
        found[f"{name} holds"] = len(compression.state_dict().get("second_moment", {}))
        compression.close()
    return found | {"ranks": gathered(found["stock"]), "tensors": len(list(net().parameters()))}


def broadcast() -> list[str]:
    """Broadcast the optimizer's state before attach(), after it, or never: Horovod makes it by a step of zeros."""
    found = []
    for order in ("before", "after", "never"):
        model = net()
        optimizer, compression = made(model, attach=FEW if order == "after" else None)
        if order != "never":
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        if order != "after":
            compression.attach(optimizer, **FEW)
        train(model, optimizer, range(12))
        found.append(digest(model.parameters()))
        compression.close()
    return found


def resumed() -> list[bool]:
    """Loaded before or after attach(): equal bits; without what is held another run, the control."""
    model = net()
    optimizer, compression = made(model, attach=FEW)
    train(model, optimizer, range(7))
    file = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "compression": compression}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    train(model, optimizer, range(7, 17))
    whole = digest(model.parameters())
    compression.close()
    found = []
    for order in ("before", "after", "without"):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model = net(seed=3)
        model.load_state_dict(saved["model"])
        optimizer, compression = made(model, attach=None if order == "before" else FEW)
        if order == "without":
            saved["compression"] = resealed(saved["compression"] | {"second_moment": {}})
        compression.load_state_dict(saved["compression"])
        if order == "before":
            compression.attach(optimizer, **FEW)
        optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, range(7, 17))
        found.append(digest(model.parameters()) == whole)
        compression.close()
    return found


def resumed_on_both_paths() -> dict[str, list[str]]:
    """The end of a run that goes on from step 33, three after the warm-up: whole, and by residuals on each path."""
    model = net()
    optimizer, compression = made(model)
    train(model, optimizer, range(33))
    file = io.BytesIO()
    parts = {"model": model, "optimizer": optimizer, "compression": compression}
    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    train(model, optimizer, range(33, 38))
    found = {"whole": [digest(model.parameters())]}
    compression.close()
    for residuals in ("restore", "reset"):
        found[residuals] = []
        for attach in (None, {}):
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            model = net(seed=3)
            model.load_state_dict(saved["model"])
            optimizer, compression = made(model, attach=attach)
            compression.load_state_dict(saved["compression"], residuals=residuals)
            optimizer.load_state_dict(saved["optimizer"])
            train(model, optimizer, range(33, 38))
            found[residuals].append(digest(model.parameters()))
            compression.close()
    return found


def clipped() -> list[list[float]]:
    """Adam's moments are those of what was clipped after synchronize()."""
    found = []
    for most in (1e9, 1e-3):
        model = net()
        optimizer, compression = made(model, attach=FEW)
        for step in range(10):  # the last one is exact
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), most)
            with optimizer.skip_synchronize():
                optimizer.step()
        moments = compression.state_dict()["second_moment"].values()
        found.append(sum(float(kept["moment"].sum()) for kept in moments) ** 0.5)
        compression.close()
    return gathered(found)


def who_steps() -> dict[str, Any]:
    """The kernel and torch: the same weights but for rounding, on all ranks; a scaler may skip steps meanwhile."""
    found: dict[str, Any] = {}
    ends = []
    for step in ("auto", "torch"):
        model = net()
        optimizer, compression = made(model, attach=FEW | {"step": step})
        scaler = compression.follow(torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3))
        for number in range(9):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            optimizer.synchronize()
            if number == 6:
                next(model.parameters()).grad[0] = float("inf")
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            assert all(p.grad is not None for p in model.parameters()) and bool(norm > 0)
        held = compression._session.steps.held
        found[step] = gathered(digest(model.parameters()))
        found[f"{step} moved"] = len(held.stepping._owed) if held.stepping else 0
        ends.append([p.detach() for p in model.parameters()])
        compression.close()
        state = optimizer.state_dict()["state"]
        found[f"{step} state"] = sorted({name for kept in state.values() for name in kept})
    return found | {"apart": farthest(*ends), "tensors": len(ends[0])}


def ways_to_step() -> dict[str, Any]:
    """Each way of Horovod's from gradients to weights is one step of Adam, and none makes what nobody asks for."""
    found: dict[str, Any] = {}
    made_for_torch = []
    stock = _Owed.pay
    _Owed.pay = lambda self: made_for_torch.append(1) or stock(self)  # type: ignore[method-assign]
    for path in ("step", "synchronize", "synchronize twice"):
        for attach in (FEW, None):
            model = net()
            optimizer, compression = made(model, attach=attach)
            made_for_torch.clear()
            # Exact steps come first, of which there are few where that was asked for.
            for number in range(36 if attach is None else 12):
                optimizer.zero_grad()
                loss_of(model, number).backward()
                if path != "step":
                    optimizer.synchronize()
                with optimizer.skip_synchronize() if path == "synchronize" else contextlib.nullcontext():
                    optimizer.step()
            name = f"{path}, {'stock' if attach is None else 'attached'}"
            found[f"{name}, pays"] = len(made_for_torch)
            grads = [p.grad for p in model.parameters()]
            found[name] = digest(model.parameters()), all(bool(grad.any()) for grad in grads)
            compression.close()
            counts = {float(kept["step"]) for kept in optimizer.state_dict()["state"].values()}
            found[f"{name}, counts"] = sorted(counts)
    _Owed.pay = stock  # type: ignore[method-assign]
    return found


def planted() -> str:
    """One rank's second moment is another one."""
    model = net()
    optimizer, compression = made(model, attach=FEW)
    train(model, optimizer, range(6))
    if RANK == 1:
        held = compression._session.steps.held
        assert held
        next(iter(held._held.values())).divisor[3] *= 1.001
    text = refused(lambda: train(model, optimizer, range(6, 8)))
    compression.close()
    return text


def different(attach: Any, adam: Any = None) -> str:
    model = net()
    optimizer, compression = made(model, attach=attach, adam=adam)
    text = refused(lambda: train(model, optimizer, range(1)))
    compression.close()
    return text


def twice(attach: Any) -> str:
    """Momentum upon momentum: known at attach(), or at the first gradient."""
    model = net()

    def attempt() -> None:
        optimizer, compression = made(model, "dgc", attach, adam=lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9))
        try:
            train(model, optimizer, range(1))
        finally:
            compression.close()

    return refused(attempt)


check("paths", paths)
check("momentum twice", lambda: [twice(None), twice({})])
check("broadcast", broadcast)
check("resumed", resumed)
check("resumed on both paths", resumed_on_both_paths)
check("clipped", clipped)
check("planted", planted)
check("other options", lambda: different(FEW | {"warmup_steps": 4 + RANK}))
check(
    "other optimizers", lambda: different({"second_moment": "auto"}, torch.optim.Adam if RANK else torch.optim.Adadelta)
)
check("who steps", who_steps)
check("ways to step", ways_to_step)
check("other steps", lambda: different(FEW | {"step": "torch" if RANK else "auto"}))
check("other moments", lambda: different({"second_moment": "own" if RANK else "auto"}))
check("not for it", lambda: refused(lambda: made(net(), attach={"second_moment": "shared"}, adam=torch.optim.Adadelta)))
