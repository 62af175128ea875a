"""The methods of this package, through the stock optimizer and ``attach()``."""

from __future__ import annotations

import ast
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import horovod_compress.torch as hvc
from horovod_compress.errors import ConfigError
from horovod_compress.options import EXCHANGES

from .base import Adapter, Check, PeerError

METHODS = hvc.available()
_CHECKS: dict[str, Check] = {"none": "float32", "fp16": "float16"}
# A slow link or a busy machine is no failure of a contestant.
_TIMEOUT_SECONDS = 600.0
# The default chooses buckets as it goes, and may choose not to compress them.
_SCHEDULE = "size:25MB"


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Return method and options of ``METHOD [ring|fold|auto] [key=value ...]``.

    Values are read as Python, and as text where they are none: ``seed=3``, ``schedule=size:4MB``.

    Raises:
        PeerError: the method is not known, or a word is neither an exchange nor an option.
    """
    method, *words = text.split() or [""]
    if method not in METHODS:
        raise PeerError(f"unknown method in {text!r}; this package has {', '.join(METHODS)}")
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if word in EXCHANGES:
            key, value = "exchange", word
        elif not (equals and key.isidentifier() and value):
            raise PeerError(f"contestant {text!r}: {word!r} is neither {', '.join(EXCHANGES)} nor key=value")
        if key in options:
            raise PeerError(f"contestant {text!r}: {key} is given twice")
        options[key] = _value(value)
    return method, options


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def adapter(text: str) -> Adapter:
    return Ours(text, *parse(text))


class Ours:
    """One method with its options.

    Raises:
        PeerError: from ``wrap``: an option is unknown or has a value that cannot be.
    """

    def __init__(self, name: str, method: str, options: dict[str, Any]) -> None:
        self.name, self.method = name, method
        self.options = {"timeout": _TIMEOUT_SECONDS, "schedule": _SCHEDULE} | options
        self.check: Check = _CHECKS.get(method, "identical")
        self.compression: Any = None

    def wrap(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        try:
            self.compression = hvc.Compression.create(self.method, model.named_parameters(), **self.options)
        except ConfigError as error:
            raise PeerError(f"contestant {self.name!r}: {error}") from error
        wrapped = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=self.compression
        )
        return model, self.compression.attach(wrapped)

    def stats(self) -> dict[str, Any]:
        return self.compression.stats() if self.compression else {"bytes_sent": 0, "seconds": {}}

    def settled(self) -> bool:
        return self.compression is None or bool(self.compression.stats()["tuned"])

    def exchange_alone(self) -> None:
        reducer = self.compression._running()
        for number in range(len(reducer.stations)):
            reducer.time_exchange(number)

    def close(self) -> None:
        if self.compression:
            self.compression.close()
