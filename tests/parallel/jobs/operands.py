"""One rank's optimizer, scaler or loaded state differs: what the ranks get, and how far."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.front import DDP, hvc, start, trained
from tests.support.nets import batch, digest, net
from tests.support.rank import arguments, check, rank

#: The last of the ranks is treated differently.
ODD, LR, WARMUP = rank() == arguments()["world"] - 1, 0.01, 4


def gathered(value: Any) -> list[Any]:
    if DDP:
        import torch.distributed as dist

        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found
    import horovod.torch as hvd

    return list(hvd.allgather_object(value, name="operands"))


class Run:
    """A model with all that trains it.

    Args:
        optimizer: options of Adam.
        created: options of the compression.
    """

    def __init__(
        self, optimizer: dict[str, Any] | None = None, *, method: str = "marsit", seed: int = 0, **created: Any
    ) -> None:
        self.model = net(seed=seed)
        self.plain = torch.optim.Adam(self.model.parameters(), **{"lr": LR} | (optimizer or {}))
        options = {"timeout": 20.0, "verify_every": 0, "schedule": "single"} | created
        self.compression = hvc.Compression.create(method, list(self.model.named_parameters()), **options)
        self.called: nn.Module
        self.called, self.optimizer = trained(
            self.model,
            self.plain,
            self.compression,
            {"warmup_steps": WARMUP, "rebuild_every": 5} if method == "marsit" else {"match_norm": False},
            {"broadcast_buffers": False, "init_sync": False},
        )
        self.steps = 0

    def step(self, *, uses: bool = True) -> str:
        """Do a step; return a hash of the gradients.

        Args:
            uses: the optimizer does its step.
        """
        self.optimizer.zero_grad()
        self.called(batch(self.steps, rank())).square().mean().backward()
        if not DDP:
            self.optimizer.synchronize()
        found = digest(p.grad for p in self.model.parameters() if p.grad is not None)
        if uses and DDP:
            self.optimizer.step()
        elif uses:
            with self.optimizer.skip_synchronize():
                self.optimizer.step()
        self.steps += 1
        return found

    def until_they_differ(self, meddle: Callable[[Run], Any] = lambda run: None, steps: int = 12) -> dict[str, Any]:
        """Train until an error; return what it says, and in which steps gradients had differed before.

        Args:
            meddle: called before each step.
        """
        silent: list[int] = []
        try:
            for number in range(steps):
                uses = meddle(self) is not False
                if len(set(gathered(self.step(uses=uses)))) > 1:
                    silent.append(number)
        except hvc.HorovodCompressError as error:
            return {"kind": type(error).__name__, "said": str(error), "at": self.steps, "silent": silent}
        finally:
            self.compression.close()
        return {"kind": "", "said": "", "at": self.steps, "silent": silent}


def options(**odd: Any) -> Callable[[], Any]:
    """Return a training in which one rank's Adam has other options."""
    return lambda: Run(odd if ODD else None).until_they_differ()


def later(step: int, **odd: Any) -> Callable[[], Any]:
    """Return one in which they change, in all groups, before a step."""

    def meddle(run: Run) -> None:
        if ODD and run.steps == step:
            for group in run.plain.param_groups:
                group.update(odd)

    return lambda: Run().until_they_differ(meddle)


def state() -> Any:
    """An optimizer state is loaded on one rank only."""
    run = Run()
    if ODD:
        model = net()
        other = torch.optim.Adam(model.parameters(), lr=LR)
        model(batch(77, 0)).square().mean().backward()
        other.step()
        run.optimizer.load_state_dict(other.state_dict())
    return run.until_they_differ()


def skips(step: int) -> Callable[[], Any]:
    """Return a training in which one rank leaves an optimizer step out."""
    return lambda: Run().until_they_differ(lambda run: not (ODD and run.steps == step))


def weights() -> Any:
    """Weights differ, and weight decay puts them into the second moment."""
    return Run({"weight_decay": 0.1}, seed=int(ODD)).until_they_differ()


def tables() -> Any:
    """A state is loaded everywhere, on one rank without what a shared table held."""
    run = Run(method="sketch_fusion", error_feedback="sketch", density=0.02)
    for _ in range(3):
        run.step()
    saved = copy.deepcopy(run.compression.state_dict())

    def meddle(run: Run) -> None:
        if run.steps == 5:
            run.compression.load_state_dict(saved, residuals="reset" if ODD else "restore")

    return run.until_they_differ(meddle)


def scaler() -> Any:
    """Gradients are multiplied by another scale on one rank."""
    run = Run()
    run.compression.follow(torch.amp.GradScaler("cpu", init_scale=2.0**9 if ODD else 2.0**8))
    return run.until_they_differ()


def operation() -> Any:
    """Only under Horovod: one rank adds up where the others average."""
    import horovod.torch as hvd

    model = net()
    named = list(model.named_parameters())
    compression = hvc.Compression.marsit(named, timeout=20.0)
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = hvd.DistributedOptimizer(plain, named, compression=compression, op=hvd.Sum if ODD else hvd.Average)
    compression.attach(optimizer)
    try:
        model(batch(0, rank())).square().mean().backward()
        optimizer.synchronize()
    except hvc.HorovodCompressError as error:
        return {"kind": type(error).__name__, "said": str(error)}
    finally:
        compression.close()


def updates(odd: dict[str, Any], step: int = -1) -> Callable[[], Any]:
    """Return a training in update mode, in which one rank's options change before a step; -1: they always were so."""

    def case() -> Any:
        model = net()
        named = list(model.named_parameters())
        compression = hvc.Compression.marsit(named, timeout=20.0, verify_every=0, schedule="single")
        plain = torch.optim.Adam(model.parameters(), **{"lr": LR} | (odd if ODD and step < 0 else {}))
        silent: list[int] = []
        number = -1
        try:
            optimizer = hvc.DistributedUpdateOptimizer(plain, named, compression, warmup_steps=WARMUP, rebuild_every=3)
            for number in range(12):
                if ODD and number == step:
                    for group in optimizer.param_groups:
                        group.update(odd)
                optimizer.zero_grad()
                model(batch(number, rank())).square().mean().backward()
                optimizer.step()
                if len(set(gathered(digest(model.parameters())))) > 1:
                    silent.append(number)
        except hvc.HorovodCompressError as error:
            return {"kind": type(error).__name__, "said": str(error), "at": number, "silent": silent}
        finally:
            compression.close()
        return {"kind": "", "said": "", "at": number, "silent": silent}

    return case


CASES = {
    "equal": options(),
    "eps": options(eps=1e-2),
    "betas": options(betas=(0.9, 0.99)),
    "rate": options(lr=0.02),
    "decay": options(weight_decay=0.1),
    "betas later": later(2, betas=(0.9, 0.9)),
    "state": state,
    "skips one": skips(2),
    "skips the last exact one": skips(WARMUP),
    "skips one before an exact one": skips(8),
    "weights": weights,
    "tables": tables,
    "scaler": scaler,
}
FOR_HOROVOD = {
    "operation": operation,
    "updates, equal": updates({}),
    "updates, eps": updates({"eps": 1e-2}),
    "updates, rate later": updates({"lr": 0.02}, 2),
    "updates, betas later": updates({"betas": (0.9, 0.9)}, 5),
}

if __name__ == "__main__":
    start()
    torch.set_num_threads(1)
    for name, case in {**CASES, **({} if DDP else FOR_HOROVOD)}.items():
        check(name, case)
