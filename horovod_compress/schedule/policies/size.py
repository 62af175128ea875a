"""Buckets of about equal size, filled in backward order, as Horovod's and DDP's fusion buffers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...errors import ConfigError
from ..plan import TensorSpec

USUAL = "25MB"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_MOST = 1 << 62  # more than any model has
_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text such as ``25MB``.

    Raises:
        ConfigError: the text is no positive number with one of the units B, KB, MB, GB.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?B)", text.strip(), re.IGNORECASE)
    size = int(min(float(match[1]) * _UNITS[match[2].upper()], _MOST)) if match else 0
    if size < 1:
        raise ConfigError(f'schedule="size:N" takes a size such as 25MB or 512KB, got {text!r}')
    return size


def group(tensors: Sequence[TensorSpec], argument: str) -> list[list[TensorSpec]]:
    """Return groups that are closed as soon as they would exceed the size."""
    groups, first = [], 0
    for count in runs([tensor.count * _BYTES[tensor.dtype] for tensor in tensors], parse_bytes(argument)):
        groups.append(list(tensors[first : first + count]))
        first += count
    return groups


def runs(sizes: Sequence[int], limit: int) -> list[int]:
    """Return how many consecutive sizes each group holds if none exceeds the limit that need not."""
    counts: list[int] = []
    room = 0
    for size in sizes:
        if not counts or size > room:
            counts.append(0)
            room = limit
        counts[-1] += 1
        room -= size
    return counts
