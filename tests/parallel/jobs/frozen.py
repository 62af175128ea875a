"""Parameters that are frozen in mid-training, on all paths; and changes that one rank makes alone."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvc
from tests.support.rank import arguments, check
from tests.support.training import digest, gathered, loss_of, net

hvd.init()
torch.set_num_threads(1)
RANK = hvd.rank()
FROZEN = ("3.weight", "3.bias", "0.bias")

OPTIMIZERS = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def build(method: str, kind: str, path: str, **options: Any) -> tuple[nn.Module, Any, hvc.Compression]:
    model = net()
    named = list(model.named_parameters())
    options = {"verify_every": 1, "timeout": 20.0, "schedule": "size:10KB"} | options
    compression = hvc.Compression.create(method, named, **options)
    optimizer = OPTIMIZERS[kind](model.parameters())
    if path == "update":
        return model, hvc.DistributedUpdateOptimizer(optimizer, named, compression, 2, warmup_steps=2), compression
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    if path == "attached":
        compression.attach(optimizer, warmup_steps=2, rebuild_every=3)
    return model, optimizer, compression


def steps(model: nn.Module, optimizer: Any, numbers: range, clear: bool = True) -> None:
    for number in numbers:
        if clear:
            optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


def set_frozen(model: nn.Module, frozen: bool) -> None:
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(not frozen)


def kept(compression: hvc.Compression) -> str:
    compression._session.reducer.wait_idle(5.0)
    states = compression._session.reducer.kept.states()
    return digest(tensors[name] for tensors in states.values() for name in FROZEN if name in tensors)


def frozen_for_a_while(method: str, kind: str, path: str, freeze: bool, clear: bool = True, **options: Any) -> Any:
    model, optimizer, compression = build(method, kind, path, **options)
    steps(model, optimizer, range(8))
    set_frozen(model, freeze)
    before, waits = [model.get_parameter(name).detach().clone() for name in FROZEN], kept(compression)
    others = digest(p for name, p in model.named_parameters() if name not in FROZEN)
    steps(model, optimizer, range(8, 16), clear)
    now = [model.get_parameter(name).detach().clone() for name in FROZEN]
    moved = max(float((a - b).abs().max()) for a, b in zip(before, now, strict=True))
    found = {
        "moved": moved,
        "waits as before": waits == kept(compression),
        "others move": others != digest(p for name, p in model.named_parameters() if name not in FROZEN),
    }
    set_frozen(model, False)
    steps(model, optimizer, range(16, 22))
    again = max(float((model.get_parameter(n) - b).abs().max()) for n, b in zip(FROZEN, now, strict=True))
    found |= {"moves again": again, "same ranks": len(set(gathered(digest(model.parameters())))) == 1}
    compression.close()
    return found


WANTED = arguments()
for path, method, kind in WANTED["kinds"]:
    for freeze in (True, False):
        name = f"{path} {method} {kind} {'frozen' if freeze else 'free'}"
        check(name, lambda m=method, k=kind, p=path, f=freeze: frozen_for_a_while(m, k, p, f))
for path in WANTED["left over"]:  # gradients that nobody clears
    check(f"{path} left over", lambda p=path: frozen_for_a_while("topk", "momentum", p, True, clear=False))
if WANTED["rest"]:
    check("searching", lambda: frozen_for_a_while("topk", "plain", "stock", True, schedule="mergecomp"))


def resumed_between_exchanges() -> Any:
    """In update mode a frozen parameter rests in the exchange after a resume, too."""
    states, found = [], []
    for resumes in (False, True):
        model, optimizer, compression = build("topk", "momentum", "update")
        steps(model, optimizer, range(4))
        set_frozen(model, True)
        before = digest(model.get_parameter(name) for name in FROZEN)
        if resumes:
            model.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            compression.load_state_dict(states[2])
        else:
            steps(model, optimizer, range(4, 5))
            found.append(before == digest(model.get_parameter(name) for name in FROZEN))
            states = [
                {name: value.clone() for name, value in model.state_dict().items()},
                torch.load(_through(optimizer.state_dict())),
                compression.state_dict(),
            ]
            before = digest(model.get_parameter(name) for name in FROZEN)
        steps(model, optimizer, range(5, 8))
        found.append(before == digest(model.get_parameter(name) for name in FROZEN) or not resumes)
        found.append(digest(model.parameters()))
        compression.close()
    return [found[0], found[2] == found[4], len(set(gathered(found[4]))) == 1]


def _through(state: Any) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


if WANTED["rest"]:
    check("resumed", resumed_between_exchanges)


def one_rank_alone(change: str, path: str, schedule: str) -> str:
    """Last, as it ends in a failed state: rank 0 makes a change that the others do not."""
    model, optimizer, compression = build("topk", "momentum", path, schedule=schedule, timeout=15.0)
    steps(model, optimizer, range(3))
    saved = compression.state_dict()
    steps(model, optimizer, range(3, 4))
    if RANK == 0 and change == "load":
        compression.load_state_dict(saved)
    if RANK == 0 and change == "freeze":
        set_frozen(model, True)
    try:
        steps(model, optimizer, range(4, 8))
        return "accepted"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        compression.close()


for path, changes in WANTED["alone"].items():
    for change in changes:
        check(f"alone {change} {path}", lambda c=change, p=path: one_rank_alone(c, p, "layerwise"))
