"""Turn `--method NAME` into a compression object, the plugin's or stock Horovod's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import horovod.torch as hvd
from torch import Tensor, nn

STOCK = {"horovod-none": hvd.Compression.none, "horovod-fp16": hvd.Compression.fp16}

Named = Iterable[tuple[str, nn.Parameter]]


class StockCompression:
    """Horovod's own compression behind the plugin's interface, as the baseline.

    Horovod does not say how much it sends, so the bytes are computed: what a ring
    all-reduce of the tensors handed to Horovod sends from each rank.
    """

    def __init__(self, name: str, parameters: Named) -> None:
        self._horovod = STOCK[name]
        self._tensors_per_step = sum(1 for _ in parameters)
        self._calls = self._bytes = self._bytes_dense = 0

    def compress(self, tensor: Tensor) -> tuple[Tensor, Any]:
        payload, context = self._horovod.compress(tensor)
        self._calls += 1
        self._bytes += payload.numel() * payload.element_size()
        self._bytes_dense += tensor.numel() * 4
        return payload, context

    def decompress(self, tensor: Tensor, context: Any) -> Tensor:
        return self._horovod.decompress(tensor, context)

    def attach(self, optimizer: Any, **options: Any) -> Any:
        return optimizer

    def stats(self) -> dict[str, Any]:
        ring = 2 * (hvd.size() - 1) / hvd.size()
        return {
            "steps": self._calls // self._tensors_per_step,
            "bytes_sent": round(ring * self._bytes),
            "bytes_dense": round(ring * self._bytes_dense),
            "bytes_computed": True,
            "seconds": {},
        }

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def available() -> list[str]:
    """Return every name `--method` takes."""
    import horovod_compress.torch as hvc

    return [*STOCK, *hvc.available()]


def create(name: str, parameters: Named, options: dict[str, Any]) -> Any:
    """Return the compression object for a method name.

    The plugin is imported only when it is used, so that a stock run is exactly what
    a user without the plugin would have.

    Raises:
        ValueError: the name is unknown, or an option does not apply to it.
    """
    if name in STOCK:
        if options:
            raise ValueError(f"{name} is stock Horovod and takes no options, got {sorted(options)}")
        return StockCompression(name, parameters)
    if name not in available():
        raise ValueError(f"unknown method {name!r}; choose one of: {', '.join(available())}")
    import horovod_compress.torch as hvc

    return hvc.Compression.create(cast("hvc.MethodName", name), parameters, **options)
