"""The methods of this package, through the stock optimizer and ``attach()``."""

from __future__ import annotations

from typing import Any, cast

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvc
from horovod_compress.engine.reducer import time_exchange
from horovod_compress.errors import ConfigError

from .base import Adapter, Check
from .names import PeerError, parse

_CHECKS: dict[str, Check] = {"none": "float32", "fp16": "float16"}
# A slow link or a busy machine is no failure of a contestant.
_TIMEOUT_SECONDS = 600.0
# The default chooses buckets as it goes, and may choose not to compress them.
_SCHEDULE = "size:25MB"
# A training begins with some exact steps, of which benchmarks are not.
_LATER = {"warmup_steps": 0}


def adapter(text: str) -> Adapter:
    return Ours(text, *parse(text))


class Ours:
    """One method with its options.

    Raises:
        PeerError: from ``wrap``: an option is unknown or has a value that cannot be.
    """

    def __init__(self, name: str, method: str, options: dict[str, Any]) -> None:
        self.name, self.method = name, method
        self.options: dict[str, Any] = {"timeout": _TIMEOUT_SECONDS, "schedule": _SCHEDULE} | _LATER | options
        self.check: Check = _CHECKS.get(method, "identical")
        self.compression: Any = None

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        try:
            self.compression = hvc.Compression.create(
                cast(hvc.MethodName, self.method), model.named_parameters(), **self.options
            )
        except ConfigError as error:
            raise PeerError(f"contestant {self.name!r}: {error}") from error
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=self.compression
        )
        attached = self.compression.attach(wrapped)
        self.skip_the_beginning()
        return model, attached

    def skip_the_beginning(self) -> None:
        """Measure norms as in the long run, and not in every step."""
        self.compression._here().reducer.norms.ratio.skip_the_beginning()

    def stats(self) -> dict[str, Any]:
        return self.compression.stats() if self.compression else {"bytes_sent": 0, "seconds": {}}

    def settled(self) -> bool:
        return self.compression is None or bool(self.compression.stats()["tuned"])

    def exchange_alone(self) -> None:
        reducer = self.compression._here().reducer
        for number in range(len(reducer.buckets)):
            time_exchange(reducer, number)

    def close(self) -> None:
        if self.compression:
            self.compression.close()
