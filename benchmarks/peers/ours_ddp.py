"""The methods of this package under torch.distributed: DistributedDataParallel's communication hook, or no wrapper."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc
from benchmarks.bandwidth import UNDER_DDP, without_front
from horovod_compress.errors import ConfigError

from .base import Adapter
from .ddp import join
from .names import PeerError, divided, parse
from .ours import Ours


def adapter(text: str) -> Adapter:
    method, options = parse(without_front(text))
    return UnderDDP(text, method, *divided(options)) if text.startswith(UNDER_DDP) else Unwrapped(text, method, options)


class Unwrapped(Ours):
    """One method with its options, which takes the gradients of a module as it is."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        join()
        try:
            self.compression = hvc.Compression.create(
                cast(hvc.MethodName, self.method), model.named_parameters(), **self.options
            )
        except ConfigError as error:
            raise PeerError(f"contestant {self.name!r}: {error}") from error
        registered = self.compression.register(self._wrapped(model), optimizer)
        self.skip_the_beginning()
        return registered, optimizer

    def _wrapped(self, model: nn.Module) -> nn.Module:
        return model


class UnderDDP(Unwrapped):
    """One method with its options, in a DistributedDataParallel set up as for DDP's own hooks.

    Args:
        ddp: options of DistributedDataParallel.
    """

    def __init__(self, name: str, method: str, ddp: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__(name, method, options)
        self._ddp = ddp

    def _wrapped(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, **self._ddp)
