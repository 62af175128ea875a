"""Clipping, and what else a program does between the exchange and the step, under either front."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from horovod_compress.engine import ratio
from tests.support.front import DDP, hvc, start, trained
from tests.support.nets import batch, digest, net
from tests.support.placing import count_ranks
from tests.support.rank import check, rank

METHODS = ("marsit", "signsgd", "topk")
SPIKES = (("topk", "AdamW"), ("marsit", "SGD"))
#: Few exact rounds, so that most are coded.
FEW = {"warmup_steps": 4, "rebuild_every": 40}
STEPS = 24
MAX_NORM = 0.01
LATE = 1000  # so many coded steps, and not all measure any more


class Said(logging.Handler):
    """Keeps what the package warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


SAID = Said()


class Run:
    """One training.

    Args:
        between: what the program does between the exchange and the step.
    """

    def __init__(
        self,
        method: str = "marsit",
        optimizer: str = "AdamW",
        between: Callable[[nn.Module], object] = lambda model: None,
        *,
        follow_lr: bool = False,
        **attach: Any,
    ) -> None:
        self.model = net(seed=1)
        self.shadow = copy.deepcopy(self.model)  # of no front, for exact gradients
        named = list(self.model.named_parameters())
        own = {"AdamW": {"lr": 2e-3}, "SGD": {"lr": 0.02, "momentum": 0.9}}[optimizer]
        plain = getattr(torch.optim, optimizer)(self.model.parameters(), **own)
        options = {"follow_lr": follow_lr} | ({} if optimizer == "AdamW" else {"warmup_steps": 4})
        self.compression = hvc.Compression.create(method, named, verify_every=1, timeout=30.0, **options)
        held = FEW if optimizer == "AdamW" else {}
        self.called, self.optimizer = trained(self.model, plain, self.compression, held | attach)
        self.between = between
        self.results: list[float] = []  # norms of what was handed back

    def train(self, steps: Iterable[int] = range(STEPS), times: float = 1.0, *, skips: bool = False) -> Run:
        for step in steps:
            self.optimizer.zero_grad()
            self.exchange(step, times)
            self.between(self.model)
            if not skips:
                self.step()
        return self

    def exchange(self, step: int, times: float = 1.0) -> None:
        (self.called(batch(step, rank())).square().mean() * times).backward()
        if not DDP:
            self.optimizer.synchronize()
        self.results.append(norm(parameter.grad for parameter in self.model.parameters()))

    def step(self) -> None:
        if DDP:
            self.optimizer.step()
        else:
            with self.optimizer.skip_synchronize():
                self.optimizer.step()

    def exact(self, step: int) -> float:
        """Return the norm of the exact mean gradient for the weights as they are, which are those of all ranks."""
        self.shadow.load_state_dict(self.model.state_dict())
        self.shadow.zero_grad()
        for number in range(count_ranks()):
            (self.shadow(batch(step, number)).square().mean() / count_ranks()).backward()
        return norm(parameter.grad for parameter in self.shadow.parameters())

    def end(self) -> dict[str, Any]:
        found = {"weights": digest(self.model.parameters()), "norms": digest([torch.tensor(self.results)])}
        stats = self.compression.stats()
        self.compression.close()
        return found | {"ratio": stats["norm_ratio"], "gradient norm": stats["gradient_norm"]}


def norm(tensors: Iterable[Any]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def clip(model: nn.Module) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


# ---- cases ----


def norms(method: str) -> dict[str, Any]:
    """Return how far the norms that clipping sees are from those of exact means, with and without matching."""
    found: dict[str, Any] = {}
    for name, attach in (("matched", {}), ("as made", {"match_norm": False})):
        run = Run(method, "AdamW", clip, **attach)
        exact = []
        for step in range(STEPS):
            exact.append(run.exact(step))
            run.train([step])
        off = [math.log(made / true) for made, true in zip(run.results, exact, strict=True)]
        found[name] = {"off": sum(off[-12:]) / 12} | run.end()
    return found


def without_clipping(optimizer: str) -> list[float]:
    """Return how far weights are from those without matching, and how far both have come."""
    first = [parameter.detach().clone() for parameter in net(seed=1).parameters()]
    ends = []
    for match in (True, False):
        run = Run("marsit", optimizer, match_norm=match)
        with mock.patch.object(ratio, "FAR", math.inf):  # a ratio that runs away would bring one more exact round
            run.train()
        ends.append([parameter.detach().clone() for parameter in run.model.parameters()])
        run.end()
    return [norm(a - b for a, b in zip(ends[0], other, strict=True)) for other in (ends[1], first)]


def spike(method: str, optimizer: str) -> list[float]:
    """Return what waits after a gradient a thousand times as large, as a multiple of before.

    The program clips its result, or takes it as it is, or skips that step.
    """
    found = []
    for between, skips in ((clip, False), (lambda model: None, False), (lambda model: None, True)):
        run, waiting = Run(method, optimizer, between), []
        for step in range(STEPS):
            spiked = step == STEPS - 4
            run.train([step], times=1000.0 if spiked else 1.0, skips=spiked and skips)
            waiting.append(run.compression.stats()["residual_norm"])
        found.append(waiting[-1] / waiting[STEPS - 5])
        run.end()
    return found


def lower_rate() -> list[bool]:
    """Return whether results at a tenth of the learning rate are taken for those of a spike, and without `expect`."""
    found = []
    for expect in (ratio.Ratio.expect, lambda ratio, growth: None):
        with mock.patch.object(ratio.Ratio, "expect", expect):
            run = Run("topk", "SGD", clip, follow_lr=True).train(range(STEPS - 4))
            run.optimizer.param_groups[0]["lr"] /= 10
            norms = run.compression._here().reducer.norms
            found.append(any(run.train([step]) and norms.ratio.usual.large for step in range(STEPS - 4, STEPS)))
            run.end()
    return found


def resumed() -> list[bool]:
    """A run that goes on from a step at which the ratio is held; and without the ratio, the control."""
    run = Run(between=clip)
    run.compression._here().reducer.norms.ratio.steps = LATE
    run.train(range(11))
    parts = (run.model, run.optimizer, run.compression)
    saved = [copy.deepcopy(part.state_dict()) for part in parts]
    whole = digest(run.train(range(11, STEPS)).model.parameters())
    run.end()
    found = []
    for keeps in (True, False):
        again = Run(between=clip)
        model, optimizer, compression = copy.deepcopy(saved)
        if not keeps:
            from horovod_compress.engine.saved import checksums

            plain = {name: value for name, value in compression.items() if name not in ("norms", checksums.KEY)}
            compression = checksums.sealed(plain)
        again.model.load_state_dict(model)
        again.compression.load_state_dict(compression)
        again.optimizer.load_state_dict(optimizer)
        found.append(digest(again.train(range(11, STEPS)).model.parameters()) == whole)
        again.end()
    return found


def add(model: nn.Module) -> None:
    """Add a weight decay, as programs of their own do."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(parameter.detach(), alpha=0.01)


def by_value(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def by_unit(model: nn.Module) -> None:
    """Clip every row by itself."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        rows = parameter.grad.view(parameter.shape[0], -1)
        rows.mul_((1e-3 / rows.norm(dim=1, keepdim=True).clamp_min(1e-12)).clamp_max(1.0))


def unscale(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(3.0)


def warned() -> dict[str, int]:
    found = {}
    for name, between in (("added", add), ("by value", by_value), ("by unit", by_unit), ("multiplied", unscale)):
        SAID.lines.clear()
        Run(between=between).train().end()
        found[name] = sum("was added to the gradient" in line for line in SAID.lines)
    return found


def on_top() -> dict[str, Any]:
    """Two exchanges for each step, the second one on top of the results of the first."""
    SAID.lines.clear()
    run = Run("marsit", "SGD")
    for step in range(12):
        run.optimizer.zero_grad()
        run.exchange(step)
        run.exchange(100 + step)
        run.step()
    said = sum("several times for one step" in line for line in SAID.lines)
    return run.end() | {"said": said, "off": run.compression._session.reducer.norms.ratio.off}


def closures() -> list[str]:
    """Return the ends of a training with closures, and of the same without."""
    ends = []
    for closing in (True, False):
        run = Run(between=clip)
        for step in range(STEPS):

            def closure(run: Run = run, step: int = step) -> None:
                run.optimizer.zero_grad()
                run.exchange(step)
                run.between(run.model)

            if closing:
                run.optimizer.step(closure)
            else:
                closure()
                run.step()
        ends.append(digest(run.model.parameters()))
        run.end()
    return ends


def refused() -> str:
    try:
        Run(match_norm="yes")
    except hvc.ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    start()
    logging.getLogger("horovod_compress").addHandler(SAID)
    for method in METHODS:
        check(f"norms {method}", lambda method=method: norms(method))
    for optimizer in ("AdamW", "SGD"):
        check(f"without clipping {optimizer}", lambda optimizer=optimizer: without_clipping(optimizer))
    for method, optimizer in SPIKES:
        check(f"spike {method} {optimizer}", lambda method=method, optimizer=optimizer: spike(method, optimizer))
    check("lower rate", lower_rate)
    check("resumed", resumed)
    check("warned", warned)
    check("on top", on_top) if DDP else None
    check("closures", closures) if DDP else None
    check("refused", refused)
