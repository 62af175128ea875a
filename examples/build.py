"""Build a run: model, optimizer and compression, new or from a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import checkpoint
import methods
from agree import stop_unless_equal, together
from tasks import TASKS, Task

ADAMS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@dataclass
class Run:
    """One training run on this rank."""

    chosen: Namespace
    task: Task
    model: nn.Module
    optimizer: Any
    compression: Any
    device: torch.device
    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    timings: list[float] = field(default_factory=list)
    training_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # since the last evaluation


def build(chosen: Namespace) -> Run:
    """Build the run; from a checkpoint when one is asked for."""
    torch.manual_seed(chosen.seed)  # the same model on every rank, before any broadcast
    task: Task = TASKS[chosen.task](chosen.shards)
    device = together(lambda: device_of(chosen.device))
    model = task.model().to(device)
    compression = together(lambda: methods.create(chosen.method, model.named_parameters(), chosen.options))
    optimizer = together(lambda: distributed(chosen, model, compression))
    run = Run(chosen, task, model, optimizer, compression, device)
    if chosen.update_mode:  # each rank has an optimizer state, and in between weights, of its own
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if chosen.load:
        run.step = together(lambda: checkpoint.load(chosen.load, chosen, model, optimizer, compression))
    stop_unless_equal("the step of the checkpoint", run.step)
    if chosen.update_mode:
        return run
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if chosen.attach:
        second_moment = {"second_moment": chosen.second_moment, "warmup_steps": chosen.exact_steps}
        run.optimizer = compression.attach(optimizer, **second_moment)
    return run


def device_of(kind: str) -> torch.device:
    """Return where this rank trains; a GPU becomes the current one.

    Raises:
        ValueError: there is no GPU.
    """
    if kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda needs a GPU, and torch sees none here (torch.version.cuda is {torch.version.cuda}); "
            "leave --device out to train on the CPU"
        )
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def distributed(chosen: Namespace, model: nn.Module, compression: Any) -> Any:
    optimizer, named = plain_optimizer(chosen, model), list(model.named_parameters())
    if not chosen.update_mode:
        return hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    import horovod_compress.torch as hvc

    options = {
        "second_moment": chosen.second_moment,
        **({"warmup_steps": chosen.exact_steps} if chosen.exact_steps else {}),
        "outer_optimizer": chosen.outer_options,
        "warmup_exchanges": chosen.warmup_exchanges,
        "overlap": chosen.overlap,
        "fragments": chosen.fragments,
    }
    return hvc.DistributedUpdateOptimizer(optimizer, named, compression, chosen.delay, **options)


def plain_optimizer(chosen: Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if chosen.optimizer in ADAMS:
        return ADAMS[chosen.optimizer](model.parameters(), lr=chosen.lr, betas=(0.9, chosen.beta2))
    return torch.optim.SGD(model.parameters(), lr=chosen.lr, momentum=chosen.momentum)
