"""One bucket per tensor: the most overlap, and the most fixed costs."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError
from ..plan import TensorSpec


def group(tensors: Sequence[TensorSpec], argument: str) -> list[list[TensorSpec]]:
    """Return every tensor as its own group."""
    if argument:
        raise ConfigError(f'schedule="layerwise" takes no argument, got {argument!r}')
    return [[tensor] for tensor in tensors]
