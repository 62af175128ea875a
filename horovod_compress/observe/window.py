"""What a compression did in a stretch of steps: the difference between two readings of its counters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Window:
    """Some steps of one rank.

    Attributes:
        steps: how many.
        seconds: of wall-clock time, all that happened between exchanges included.
        bytes_sent: handed to the transport.
        bytes_dense: what a ring in float32 would have sent.
        busy: seconds in which something was exchanged.
        hidden: the part of these behind the backward pass.
        phases: seconds by phase.
    """

    steps: int
    seconds: float
    bytes_sent: float
    bytes_dense: float
    busy: float
    hidden: float
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def times_fewer_bytes(self) -> float:
        """Return how many times the bytes a ring in float32 would have sent; 0 where nothing was sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 0.0

    @property
    def overlap(self) -> float:
        """Return the share of the exchange that is hidden, from 0 to 1; 0 where nothing was exchanged."""
        return self.hidden / self.busy if self.busy else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Return the mean over these steps."""
        return self.seconds / self.steps if self.steps else 0.0


def between(before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> Window:
    """Return what happened between two readings of a compression's ``stats()``."""
    names = ("steps", "bytes_sent", "bytes_dense")
    steps, sent, dense = (after[name] - before.get(name, 0) for name in names)
    overlap, earlier = after["overlap_seconds"], before.get("overlap_seconds", {})
    busy, hidden = (overlap[name] - earlier.get(name, 0.0) for name in ("busy", "hidden"))
    phases = {name: value - before.get("seconds", {}).get(name, 0.0) for name, value in after["seconds"].items()}
    return Window(steps, seconds, sent, dense, busy, hidden, phases)
