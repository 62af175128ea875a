"""The optimizer's step: ours, torch's, and behind a local step of Marsit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from horovod_compress import ops

from .arrays import Arrays
from .case import Case, kernel_case
from .signs import local_step

ADAM: dict[str, Any] = {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "left": 0.01}
ADAM_STEP: dict[str, Any] = {"betas": (0.9, 0.999), "step": 7.0, "bound": 10.0, "lr": 1e-3, "eps": 1e-8, "by": 0.7}
SGD_STEP: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}


class Held:
    """Marsit's local step with AdamW behind it: torch's own, and one that divides by a second moment that is held."""

    def __init__(self, a: Arrays) -> None:
        self.a, self.divisor, self.square = a, a.grad.float().abs() + 0.5, a.residual.square()
        parameter = torch.nn.Parameter(a.work.clone())
        parameter.grad = a.work
        self.adam = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
        self.adam.step()
        self.state, self.weight = self.adam.state[parameter], parameter.detach()

    def arguments(self) -> tuple[object, ...]:
        return [self.state["exp_avg_sq"]], [self.state["exp_avg"]], [self.a.work], [self.square], None

    def own(self) -> None:
        local_step(self.a)
        self.adam.step()

    def moved(self) -> tuple[object, ...]:
        return [self.weight], [self.state["exp_avg"]], [self.a.work], [self.square], None

    def held(self, *, short: bool = False) -> None:
        local_step(self.a, self.divisor, short=short)
        ops.adam_step_all(*self.moved(), **ADAM_STEP)  # type: ignore[arg-type]


def adam(a: Arrays) -> Iterable[Case]:
    h, n, g, bits = Held(a), a.count, a.grad_bytes, 16 * a.words
    yield kernel_case("adam_hold_all", (3 * g + 4) * n, "adam_hold_all", *h.arguments(), **ADAM)
    yield kernel_case("adam_step_all", (5 * g + 4) * n, "adam_step_all", *h.moved(), **ADAM_STEP)
    yield Case("torch's AdamW, fused", 7 * g * n, h.adam.step)
    yield Case("local step and AdamW", (10 * g + 12) * n + bits, h.own)
    yield Case("local step, AdamW, second moment held", (8 * g + 24) * n + bits, h.held)
    shorter = (8 * g + 18) * n + bits
    yield Case("local step, AdamW, second moment held, bfloat16", shorter, lambda: h.held(short=True))


def sgd(a: Arrays) -> Iterable[Case]:
    """SGD with momentum and weight decay: ours, and torch's with its defaults and fused."""
    n, g, parameter = a.count, a.grad_bytes, torch.nn.Parameter(a.work.clone())
    parameter.grad = a.grad.clone()
    optimizers = {fused: torch.optim.SGD([parameter], **SGD_STEP, fused=fused) for fused in (False, True)}
    for optimizer in optimizers.values():
        optimizer.step()
    moved = [parameter.detach()], [optimizers[True].state[parameter]["momentum_buffer"]], [a.grad]
    yield kernel_case("sgd_step_all", 5 * g * n, "sgd_step_all", *moved, **SGD_STEP, by=0.7)
    yield Case("torch's SGD", 11 * g * n, optimizers[False].step)
    yield Case("torch's SGD, fused", 5 * g * n, optimizers[True].step)
