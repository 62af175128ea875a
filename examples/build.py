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


@dataclass
class Run:
    """One training run on this rank."""

    chosen: Namespace
    task: Task
    model: nn.Module
    optimizer: Any
    compression: Any
    step: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)
    timings: list[float] = field(default_factory=list)
    training_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)  # since the last evaluation


def build(chosen: Namespace) -> Run:
    """Build the run; from a checkpoint when one is asked for."""
    torch.manual_seed(chosen.seed)  # the same model on every rank, before any broadcast
    task: Task = TASKS[chosen.task]()
    model = task.model()
    compression = together(lambda: methods.create(chosen.method, model.named_parameters(), chosen.options))
    optimizer = hvd.DistributedOptimizer(
        plain_optimizer(chosen, model),
        named_parameters=model.named_parameters(),
        compression=compression,
    )
    run = Run(chosen, task, model, optimizer, compression)
    if chosen.load:
        run.step = together(lambda: checkpoint.load(chosen.load, chosen, model, optimizer, compression))
    stop_unless_equal("the step of the checkpoint", run.step)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    if chosen.attach:
        run.optimizer = compression.attach(optimizer)
    return run


def plain_optimizer(chosen: Namespace, model: nn.Module) -> torch.optim.Optimizer:
    if chosen.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=chosen.lr)
    return torch.optim.SGD(model.parameters(), lr=chosen.lr, momentum=0.9)
