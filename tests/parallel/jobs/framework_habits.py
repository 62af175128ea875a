"""What frameworks do beside a plain loop: wrapped optimizers, closures after no_sync(), adapters, a second training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.front import hvc, start
from tests.support.logs import told
from tests.support.nets import batch, digest
from tests.support.rank import check, rank, refusal

start()
torch.set_num_threads(1)


class AsAccelerate(torch.optim.Optimizer):
    """A wrapper with no hooks of its own, as it never calls torch's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


class AsLightning(torch.optim.AdamW):
    """A wrapper that imitates the class of what it wraps, and passes on what it has not, as hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))


def made(model: nn.Module, method: str = "marsit") -> Any:
    return hvc.Compression.create(method, model.named_parameters(), timeout=20.0)


def backward(called: Any, step: int) -> None:
    called(batch(step, rank())).square().mean().backward()


def wrapped_optimizer(wrapper: Any) -> list[Any]:
    model = net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    given = wrapper(optimizer)
    (compression := made(model)).register(model, given)
    for step in range(40):
        optimizer.zero_grad()
        backward(model, step)
        given.step()
    found = [len(compression.state_dict()["second_moment"]), digest(model.parameters())]
    compression.close()
    return found


WRAPPERS = (
    AsAccelerate,
    AsLightning,
    lambda optimizer: AsLightning(AsAccelerate(optimizer)),
    lambda optimizer: optimizer,
)
check("wrapped optimizer", lambda: [wrapped_optimizer(wrapper) for wrapper in WRAPPERS])


def wrapped_for_updates(wrapper: Any) -> str:
    model = net()
    given = wrapper(torch.optim.AdamW(model.parameters(), lr=0.01))
    return refusal(lambda: hvc.DistributedUpdateOptimizer(given, model.named_parameters(), made(model)))


check("wrapped for updates", lambda: [wrapped_for_updates(wrapper) for wrapper in WRAPPERS])


def accumulated(wraps: bool, exchanges: bool) -> list[Any]:
    """Accumulate as Lightning does: the last pass of a step is in the closure."""
    model = net()
    called = DistributedDataParallel(model) if wraps else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (compression := made(model, "none")).register(called, optimizer)

    def last() -> None:
        if exchanges:
            backward(called, step)

    with told() as texts:
        for step in range(3):
            optimizer.zero_grad()
            with compression.no_sync():
                backward(called, step + 10)
            optimizer.step(last)  # type: ignore[arg-type]
        compression.close()
    return [[text for text in texts if "compressed nothing" in text], digest(model.parameters())]


check("accumulated", lambda: [accumulated(wraps, exchanges=True) for wraps in (True, False)])
check("never exchanged", lambda: [accumulated(wraps, exchanges=False) for wraps in (True, False)])


def switched(wraps: bool, at: int, elsewhere: bool = False) -> list[str]:
    """Train one layer, then only the other one, which was frozen when all was created.

    Args:
        elsewhere: another compression exchanges it then.
    """
    model = net()
    model[1].requires_grad_(False)
    called = DistributedDataParallel(model, find_unused_parameters=True) if wraps else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (compression := made(model, "none")).register(called, optimizer)
    with told() as texts:
        for step in range(4):
            if step == at:
                model[1].requires_grad_(True)
                model[3].requires_grad_(False)
                if elsewhere:
                    made(model[1], "none").register(model[1])  # which keeps it
            optimizer.zero_grad()
            backward(called, step)
            optimizer.step()
        compression.close()
    return [text for text in texts if "never reduced" in text]


check("switched", lambda: [switched(wraps, at) for wraps in (True, False) for at in (2, 0)])
check("switched to another", lambda: switched(wraps=False, at=2, elsewhere=True))


def registered_again(close: bool) -> str:
    model = net()
    called = DistributedDataParallel(model)
    (compression := made(model)).register(called)
    if close:
        compression.close()
    return refusal(lambda: made(model).register(called))


check("registered again", lambda: [registered_again(close) for close in (True, False)])
