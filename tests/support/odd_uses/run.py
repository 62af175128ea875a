"""One training of an odd kind, with a method or the framework alone; and the cases, which register themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.front import DDP, hvc
from tests.support.rank import rank

LR, STEPS, LONG = 0.05, 4, 20.0

if DDP:
    from torch.nn.parallel import DistributedDataParallel
else:
    import horovod.torch as hvd


class Run:
    """One training: with a method, or the framework alone."""

    def __init__(self, way: str, method: str | None, number: int, name: str = "") -> None:
        self.way, self.method, self.name = way, method, f"{name}{number}{way}{method}."
        self.compressions: list[Any] = []

    def start(self, model: nn.Module, optimizer: Any = None, **options: Any) -> tuple[Any, Any]:
        """Return what is called, and the optimizer."""
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=LR, momentum=0.0)
        named = [(self.name + name, p) for name, p in model.named_parameters()]
        compression = None
        if self.method:
            more = {"verify_every": 1, "timeout": LONG, "min_elements": 1, "warmup_steps": 0}
            compression = hvc.Compression.create(self.method, named, **more)
            self.compressions.append(compression)
        if not DDP:
            given = compression or hvd.Compression.none
            optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=given, **options)
            if compression and self.way == "attached":
                compression.attach(optimizer)
            return model, optimizer
        called = (
            model
            if compression and self.way == "plain"
            else DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
        )
        if compression:
            compression.register(called, optimizer)
        return called, optimizer

    def close(self) -> None:
        for compression in self.compressions:
            compression.close()


def data(step: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (8, 6)), generator=torch.Generator().manual_seed(100 * step + rank()))


def small(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))


def loss_of(model: Any, step: int) -> Tensor:
    return model(data(step)).square().mean()


CASES: dict[str, Callable[[Run], nn.Module]] = {}


def case(function: Callable[[Run], nn.Module]) -> Callable[[Run], nn.Module]:
    """Register a training by the words of its name; it returns the model."""
    CASES[function.__name__.replace("_", " ").strip()] = function
    return function


def simple(
    model: nn.Module, run: Run, loss: Any = loss_of, steps: int = STEPS, set_to_none: bool = True, before: Any = None
) -> nn.Module:
    called, optimizer = run.start(model)
    for step in range(steps):
        model.zero_grad(set_to_none=set_to_none)
        if before:
            before(model, step)
        loss(called, step).backward()
        optimizer.step()
    return model


@dataclass
class At:
    """A step of a training."""

    model: nn.Module
    called: Any
    optimizer: Any
    step: int

    def loss(self) -> Tensor:
        return loss_of(self.called, self.step)


def each_step(
    *,
    zeroes: bool = True,
    steps: int = STEPS,
    model: Callable[[], nn.Module] = small,
    optimizer: Callable[[Any], Any] = lambda parameters: None,
) -> Callable[[Callable[[At], None]], Callable[[Run], nn.Module]]:
    """Register a training by what it does in each step.

    Args:
        zeroes: the optimizer's gradients are zeroed first.
        optimizer: makes it of the parameters; None for the usual one.
    """

    def register(step_of: Callable[[At], None]) -> Callable[[Run], nn.Module]:
        def train(run: Run) -> nn.Module:
            made = model()
            called, stepping = run.start(made, optimizer(made.parameters()))
            for step in range(steps):
                if zeroes:
                    stepping.zero_grad()
                step_of(At(made, called, stepping, step))
            return made

        train.__name__ = step_of.__name__
        return case(train)

    return register
