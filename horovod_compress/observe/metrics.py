"""Counters of one reducer, and the clock that fills them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PHASES = ("offer", "encode", "exchange", "decode", "verify", "wait")


@dataclass
class Metrics:
    """What happened so far on this rank.

    Attributes:
        steps: finished steps.
        bytes_sent: every byte handed to the transport, headers and statistics included.
        bytes_dense: what a ring all-reduce in float32 would have sent.
        seconds: per phase; ``wait`` is how long the training thread waited for results, the
            others add up over buckets and overlap with the backward pass.
        nonfinite: non-finite values offered, over all ranks, those that count as 0 included.
        trace: called with (phase, began, ended, *where), while somebody records a timeline; on any thread.
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_dense: float = 0.0
    nonfinite: int = 0
    verified: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    trace: Callable[..., None] | None = None

    def timed(self, phase: str, within: str | None = None, where: tuple[Any, ...] = ()) -> _Timed:
        """Add the time of a block to a phase, and take it from the one that it is a part of.

        Args:
            where: step, bucket and name for a timeline; without it the block is not shown.
        """
        return _Timed(self, phase, within, where)

    def document(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "bytes_sent": self.bytes_sent,
            "bytes_dense": round(self.bytes_dense),
            "seconds": dict(self.seconds),
            "nonfinite": self.nonfinite,
            "verified": self.verified,
        }


class _Timed:
    """A block of :meth:`Metrics.timed`. Not a generator: those cost twice as much, and every gradient has some."""

    __slots__ = ("_began", "_metrics", "_phase", "_where", "_within")

    def __init__(self, metrics: Metrics, phase: str, within: str | None, where: tuple[Any, ...]) -> None:
        self._metrics, self._phase, self._within, self._where = metrics, phase, within, where

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        ended, metrics = time.perf_counter(), self._metrics
        metrics.seconds[self._phase] += ended - self._began
        if self._within:
            metrics.seconds[self._within] -= ended - self._began
        if self._where and (trace := metrics.trace):
            trace(self._phase, self._began, ended, *self._where)
