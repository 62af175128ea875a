"""The few lines of training under Horovod around the small models of :mod:`.nets`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

import horovod_compress.torch as hvc

from .nets import batch as batch, digest as digest, net as net

LR = 0.05
_HVD_OPTIONS = ("op", "groups", "num_groups", "backward_passes_per_step", "gradient_predivide_factor",
                "process_set", "sparse_as_dense")  # fmt: skip


def loss_of(model: nn.Module, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return model(batch(step, hvd.rank(), dtype)).square().mean()


class Words(nn.Module):
    """The embedding is the last in backward order, and alone in its bucket when layerwise."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.out = nn.Embedding(50, 16, sparse=sparse), nn.Linear(16, 16)


def word_loss(model: nn.Module, step: int) -> Tensor:
    words = torch.randint(50, (20,), generator=torch.Generator().manual_seed(7 * step + hvd.rank()))
    return model.out(model.embedding(words)).square().mean()


def optimizer_for(
    model: nn.Module, method: Any, attach: bool = False, prefix: str = "", **options: Any
) -> tuple[Any, hvc.Compression | None]:
    """Return a Horovod optimizer and its compression; ``method`` None is Horovod alone.

    Args:
        method: a name, a codec, or methods by pattern.
        prefix: of the parameters' names: Horovod wants those of two optimizers to differ.
        options: of Horovod's optimizer and of the compression.
    """
    named = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
    ours = {name: options.pop(name) for name in list(options) if name in _HVD_OPTIONS}
    compression = None
    if method is not None:
        shared = {"process_set": ours["process_set"]} if "process_set" in ours else {}
        options = {"verify_every": 1, "timeout": 20.0, "warmup_steps": 0} | options | shared
        make = hvc.Compression.per_layer if isinstance(method, dict) else hvc.Compression.create
        compression = make(method, named, **options)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=0.0 if _has_momentum(compression) else 0.9),
        named_parameters=named,
        compression=compression or hvd.Compression.none,
        **ours,
    )
    if attach and compression:
        assert compression.attach(optimizer) is optimizer
    return optimizer, compression


def _has_momentum(compression: hvc.Compression | None) -> bool:
    """Return whether a method keeps a momentum of its own, upon which that of the optimizer is refused."""
    session = getattr(compression, "_session", None)  # a rank outside the process set has none
    codecs = [codec for _, codec in session.steps._methods.rules] if session else []
    return any(getattr(codec, "momentum", 0.0) or getattr(codec, "beta", 0.0) for codec in codecs)


def train(
    model: nn.Module,
    optimizer: Any,
    steps: Iterable[int],
    loss: Callable[[nn.Module, int], Tensor] = loss_of,
    passes: int = 1,
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for extra in range(passes):
            loss(model, step + 100 * extra).backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def farthest(a: Iterable[Tensor], b: Iterable[Tensor]) -> float:
    """Return the largest difference of two lists of tensors."""
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


def gathered(value: Any) -> list[Any]:
    """Return every rank's value."""
    return hvd.allgather_object(value, name="test.gathered")
