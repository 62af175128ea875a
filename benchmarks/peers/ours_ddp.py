"""The methods of this package under PyTorch's DistributedDataParallel, through its communication hook."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod_compress.ddp as hvc
from horovod_compress.errors import ConfigError

from .base import Adapter
from .ddp import join
from .names import UNDER_DDP, PeerError, parse
from .ours import Ours


def adapter(text: str) -> Adapter:
    return UnderDDP(text, *parse(text.removeprefix(UNDER_DDP)))


class UnderDDP(Ours):
    """One method with its options, in a DistributedDataParallel set up as for DDP's own hooks."""

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        join()
        try:
            self.compression = hvc.Compression.create(self.method, model.named_parameters(), **self.options)
        except ConfigError as error:
            raise PeerError(f"contestant {self.name!r}: {error}") from error
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return self.compression.register(wrapped, optimizer), optimizer
