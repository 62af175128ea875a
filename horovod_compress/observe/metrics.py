"""Counters of one reducer, and the clock that fills them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .stats import Counted

PHASES = ("offer", "encode", "exchange", "decode", "verify", "wait")


@dataclass
class Metrics:
    """What happened so far on this rank.

    Attributes:
        steps: finished steps.
        bytes_sent: every byte handed to the transport, headers and statistics included.
        bytes_exact, bytes_compressed: gradients as plain numbers, of 16 bits or more, and as a method encodes them. The
            rest of ``bytes_sent`` are comparisons.
        bytes_dense: what a ring all-reduce in float32 would have sent.
        exact_steps: steps in which nothing was compressed.
        seconds: per phase; ``wait`` is how long the training thread waited for results, the
            others add up over buckets and overlap with the backward pass.
        nonfinite: non-finite values offered, over all ranks, those that count as 0 included.
        trace: called with (phase, began, ended, *where), while somebody records a timeline; on any thread.
    """

    steps: int = 0
    bytes_sent: int = 0
    bytes_exact: int = 0
    bytes_compressed: int = 0
    exact_steps: int = 0
    bytes_dense: float = 0.0
    nonfinite: int = 0
    verified: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    trace: Callable[..., None] | None = None
    _before: tuple[int, int] = (0, 0)  # exact and compressed bytes before the step under way

    @property
    def times_fewer_bytes(self) -> float:
        """The ratio: how many times the bytes a float32 ring would have sent; 0 where nothing was sent."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else 0.0

    def sent(self, nbytes: int, *, exact: bool) -> None:
        """Count bytes of gradients."""
        self.bytes_sent += nbytes
        if exact:
            self.bytes_exact += nbytes
        else:
            self.bytes_compressed += nbytes

    def end_step(self) -> None:
        """Count a step."""
        before, self._before = self._before, (self.bytes_exact, self.bytes_compressed)
        self.exact_steps += self.bytes_exact > before[0] and self.bytes_compressed == before[1]
        self.steps += 1

    def timed(self, phase: str, within: str | None = None, where: tuple[Any, ...] = ()) -> _Timed:
        """Add the time of a block to a phase, and take it from the one that it is a part of.

        Args:
            where: step, bucket and name for a timeline; without it the block is not shown.
        """
        return _Timed(self, phase, within, where)

    def document(self) -> Counted:
        return {
            "steps": self.steps,
            "bytes_sent": self.bytes_sent,
            "bytes_exact": self.bytes_exact,
            "bytes_compressed": self.bytes_compressed,
            "bytes_dense": round(self.bytes_dense),
            "times_fewer_bytes": self.times_fewer_bytes,
            "exact_steps": self.exact_steps,
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
