"""A held second moment beside what else a training loop does; three ranks."""

from __future__ import annotations

import copy
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvc
from tests.support.rank import check
from tests.support.training import digest, gathered, loss_of, net, train

EVEN = hvd.ProcessSet([0, 2])
RANK = hvd.init(process_sets=[EVEN]) or hvd.rank()
RATE, FEW = 0.01, {"second_moment": "shared", "warmup_steps": 4, "rebuild_every": 5}
torch.set_num_threads(1)


class Run:
    """A model, AdamW around it and what hands its gradients over.

    Args:
        attach: options of ``attach()``; None for the stock path.
        ours: of Horovod's optimizer.
    """

    def __init__(
        self,
        method: Any = "marsit",
        options: dict[str, Any] | None = None,
        adam: dict[str, Any] | None = None,
        attach: dict[str, Any] | None = FEW,
        **ours: Any,
    ) -> None:
        self.model = net()
        named = list(self.model.named_parameters())
        shared = {"process_set": ours["process_set"]} if "process_set" in ours else {}
        make = hvc.Compression.per_layer if isinstance(method, dict) else hvc.Compression.create
        self.compression = make(method, named, verify_every=1, timeout=20.0, **shared, **(options or {}))
        inner = torch.optim.AdamW(self.model.parameters(), lr=RATE, **(adam or {}))
        self.optimizer = hvd.DistributedOptimizer(inner, named_parameters=named, compression=self.compression, **ours)
        if attach is not None:
            self.compression.attach(self.optimizer, **attach)

    def moments(self) -> float:
        kept = self.compression.state_dict()["second_moment"].values()
        return sum(float(one["moment"].sum()) for one in kept)

    def end(self) -> dict[str, Any]:
        """Return what every case is asked for."""
        self.compression.close()
        finite = all(bool(p.isfinite().all()) for p in self.model.parameters())
        return {"ranks": len(set(gathered(digest(self.model.parameters())))), "finite": finite}


def trained(steps: int = 14, passes: int = 1, **given: Any) -> dict[str, Any]:
    run = Run(**given)
    train(run.model, run.optimizer, range(steps), passes=passes)
    held = len(run.compression.state_dict()["second_moment"])
    return run.end() | {"held": held}


def on_both_paths(passes: int = 1, **given: Any) -> list[str]:
    """The weights after four compressed steps, with defaults."""
    digests = []
    for attach in ({}, None):
        run = Run(attach=attach, **given)
        train(run.model, run.optimizer, range(35), passes=passes)
        digests.append(digest(run.model.parameters()))
        run.compression.close()
    return digests


def in_a_process_set() -> dict[str, Any]:
    """Two of three ranks; Adam divides the number of ranks out again, so a sum gives the bits of a mean."""
    digests = {}
    for op in (hvd.Average, hvd.Sum) if EVEN.included() else ():
        run = Run(process_set=EVEN, op=op, adam={"eps": 1e-16})
        train(run.model, run.optimizer, range(14))
        digests[str(op)] = digest(run.model.parameters())
        run.compression.close()
    return {"digests": gathered(list(digests.values()))}


def overflowed(at: int) -> dict[str, Any]:
    """A scaler skips a step, the exact one or the one before; the second moment moves with the next that is made."""
    run = Run()
    scaler = run.compression.follow(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))
    moments = []
    for step in range(14):
        run.optimizer.zero_grad()
        factor = float("inf") if step == at and RANK == 1 else 1.0
        scaler.scale(loss_of(run.model, step) * factor).backward()
        run.optimizer.synchronize()
        scaler.unscale_(run.optimizer)
        with run.optimizer.skip_synchronize():
            scaler.step(run.optimizer)
        scaler.update()
        moments.append(run.moments() if step >= 5 else 0.0)
    return run.end() | {"moved": [step for step in range(6, 14) if moments[step] != moments[step - 1]]}


def thawed() -> dict[str, Any]:
    """A layer is frozen for the first steps, and then learns."""
    run = Run()
    late = list(run.model[3].parameters())
    for parameter in late:
        parameter.requires_grad_(False)
    moved = []
    for step in range(14):
        if step == 7:
            for parameter in late:
                parameter.requires_grad_(True)
        moved.append(farthest(run.model[3], lambda step=step: train(run.model, run.optimizer, [step])))
    return run.end() | {"moved": moved}


def to_and_fro() -> dict[str, Any]:
    """The optimizer's state goes on in torch alone, and what torch alone leaves is taken up again."""
    run, moved = Run(), []
    train(run.model, run.optimizer, range(8))
    model = copy.deepcopy(run.model)
    stock = torch.optim.AdamW(model.parameters(), lr=RATE)
    stock.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for step in range(8, 12):
        stock.zero_grad()
        loss_of(model, step).backward()
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = hvd.allreduce(parameter.grad, name=f"stock.{step}.{number}")
        moved.append(farthest(model, stock.step))
    run.model.load_state_dict(model.state_dict())
    run.optimizer.load_state_dict(copy.deepcopy(stock.state_dict()))
    moved += [farthest(run.model, lambda step=step: train(run.model, run.optimizer, [step])) for step in range(12, 18)]
    return run.end() | {"moved": moved}


def farthest(model: nn.Module, act: Any) -> float:
    """Return by how many learning rates a step moves any weight at most."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    act()
    return max(float((p - b).abs().max()) for p, b in zip(model.parameters(), before, strict=True)) / RATE


check("plain", trained)
check("two passes", lambda: trained(passes=2, backward_passes_per_step=2))
check("process set", in_a_process_set)
check("overflow in an exact step", lambda: overflowed(9))
check("overflow elsewhere", lambda: overflowed(8))
check("thawed", thawed)
check("to and fro", to_and_fro)
check("per layer", lambda: trained(method={"0.*": "topk", "3.*": "powersgd", "*": "marsit"}))
check("by step", lambda: trained(method=hvc.by_step({0: "none", 6: "marsit"})))
check("fused", lambda: trained(adam={"fused": True}))
check("maximize", lambda: trained(adam={"maximize": True, "foreach": True, "weight_decay": 0.1}))
check("onebit_adam", lambda: trained(method="onebit_adam"))
check("both paths, two passes", lambda: on_both_paths(passes=2, backward_passes_per_step=2))
check("both paths, sum", lambda: on_both_paths(op=hvd.Sum, method="onebit_adam"))
check("both paths, layerwise", lambda: on_both_paths(options={"schedule": "layerwise"}, method="topk"))
check("layerwise", lambda: trained(options={"schedule": "layerwise"}, method="ef_signsgd"))
