"""The methods of this package under PyTorch's DistributedDataParallel, through its communication hook."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc
from horovod_compress.errors import ConfigError

from .base import Adapter
from .ddp import join
from .names import UNDER_DDP, PeerError, divided, parse
from .ours import Ours


def adapter(text: str) -> Adapter:
    method, options = parse(text.removeprefix(UNDER_DDP))
    return UnderDDP(text, method, *divided(options))


class UnderDDP(Ours):
    """One method with its options, in a DistributedDataParallel set up as for DDP's own hooks.

    Args:
        ddp: options of DistributedDataParallel.
    """

    def __init__(self, name: str, method: str, ddp: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__(name, method, options)
        self._ddp = ddp

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        join()
        try:
            self.compression = hvc.Compression.create(
                cast(hvc.MethodName, self.method), model.named_parameters(), **self.options
            )
        except ConfigError as error:
            raise PeerError(f"contestant {self.name!r}: {error}") from error
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, **self._ddp)
        return self.compression.register(wrapped, optimizer), optimizer
