"""How many threads kernels work on: as many as torch's own operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Let kernels and torch work on the calling thread only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
