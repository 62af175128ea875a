"""What a recipe is: data, network and loss, and the settings that its kind of network is usually trained with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Held-out results: the mean loss, and the accuracy where there is one.
Result = tuple[float, float | None]


class Problem(Protocol):
    """Data and network of one recipe."""

    def model(self) -> nn.Module: ...

    def loss(self, model: Any, size: int) -> Tensor:
        """Return the training loss of a batch drawn from torch's generator, with augmentation and penalties."""

    def held_out(self, model: Any) -> Result:
        """Return the plain loss on what is held out; the model is in evaluation mode."""


@dataclass(frozen=True)
class Recipe:
    """One training.

    Attributes:
        said: data, network and settings in words, for people.
        problem: makes data and network; ``quick`` leaves out what takes long, for tests.
        metric: what people would look at: "loss" or "accuracy".
        batch: samples of one rank.
        decay: of matrices; biases, norms and embeddings have none, except with SGD.
        max_norm: the gradient's norm is clipped to this, None if it is not.
        schedule: after a warm-up over a tenth of the steps, "cosine" to zero or "constant".
        average: share of the old in a running mean of the weights, which is what is measured; 0 without one.
    """

    said: str
    problem: Callable[[bool], Problem]
    metric: str
    steps: int
    batch: int
    lr: float
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    decay: float = 0.01
    max_norm: float | None = None
    schedule: str = "cosine"
    average: float = 0.0

    def make_optimizer(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=lr, momentum=0.9, weight_decay=self.decay)
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        decayed = [p for p in trained if p.dim() in (2, 4) and id(p) not in embeddings]
        others = [p for p in trained if p.dim() not in (2, 4) or id(p) in embeddings]
        groups = [{"params": decayed, "weight_decay": self.decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=self.betas)

    def share(self, step: int, steps: int) -> float:
        """Return the share of the learning rate in a step."""
        warmup = max(1, steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))


def classified(model: Callable[[Any], Tensor], pairs: Iterator[tuple[Any, Tensor]]) -> Result:
    """Return mean loss and accuracy over pairs of inputs and targets, of any number of dimensions."""
    loss, right, count = 0.0, 0, 0
    for inputs, targets in pairs:
        scores, wanted = model(inputs).flatten(0, -2), targets.flatten()
        loss += float(F.cross_entropy(scores, wanted, reduction="sum"))
        right, count = right + int((scores.argmax(dim=1) == wanted).sum()), count + len(wanted)
    return loss / count, right / count
