"""One bucket for everything: the fewest fixed costs, and no overlap."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import ConfigError
from ..plan import TensorSpec


def group(tensors: Sequence[TensorSpec], argument: str) -> list[list[TensorSpec]]:
    """Return all tensors as one group."""
    if argument:
        raise ConfigError(f'schedule="single" takes no argument, got {argument!r}')
    return [list(tensors)] if tensors else []
