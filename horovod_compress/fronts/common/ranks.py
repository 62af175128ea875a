"""What the commands that check and measure ask of a framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from ...codecs.base import Codec
from ...known import MethodName

#: Seconds for what is to succeed, on a machine that may be busy.
PATIENCE = 30.0


class Training(NamedTuple):
    """A model under a compression: its optimizer, and what is called in place of the model."""

    compression: Any  # the front's own Compression
    optimizer: Any
    called: Callable[..., Any]


class Ranks(Protocol):
    """The ranks of a job that the framework has started."""

    #: Of the framework, as timings are named.
    name: str

    @property
    def rank(self) -> int:
        """Return the number of this rank."""

    @property
    def size(self) -> int:
        """Return how many there are."""

    def gather(self, value: Any, name: str, seconds: float = PATIENCE) -> list[Any]:
        """Return plain data of every rank, in rank order."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' numbers."""

    def mean(self, tensor: Tensor) -> None:
        """Take the mean over ranks in place, as the framework does."""

    def mean_in_fp16(self, tensor: Tensor) -> None:
        """Take the mean over ranks in place, as the framework's own fp16 compression does."""

    def train(
        self, model: nn.Module, method: MethodName | Codec, optimizer: Optimizer | None = None, **options: Any
    ) -> Training:
        """Begin a training with a method; by SGD, if nothing else is given."""

    def exchange(self, training: Training, parameter: nn.Parameter, grad: Tensor) -> None:
        """Exchange one gradient and wait for its result, without a backward pass."""
