"""The job that a command runs in: of one rank, where ``horovodrun`` did not start it."""

from __future__ import annotations

import horovod.torch as hvd


def begin() -> tuple[int, int]:
    """Start Horovod; return this rank, and how many there are."""
    hvd.init()
    return hvd.rank(), hvd.size()
