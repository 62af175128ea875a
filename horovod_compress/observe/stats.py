"""The counters of a compression, as ``stats()`` returns them."""

from __future__ import annotations

from typing import TypedDict


class OverlapSeconds(TypedDict):
    """Seconds in which an exchange was under way, and those of them that the backward pass hid."""

    busy: float
    hidden: float


class Counted(TypedDict):
    """What :class:`.metrics.Metrics` counts.

    Attributes:
        steps: finished steps.
        bytes_sent: bytes handed to the transport, headers included.
        bytes_exact, bytes_compressed: the parts of it that were gradients as plain numbers, and compressed ones.
        bytes_dense: bytes that a float32 ring would have sent.
        times_fewer_bytes: the ratio of ``bytes_dense`` and ``bytes_sent``.
        exact_steps: those in which nothing was compressed.
        seconds: per phase.
        nonfinite: NaN and infinite values offered by all ranks together, however they are treated.
        verified: steps whose results were compared across ranks.
    """

    steps: int
    bytes_sent: int
    bytes_exact: int
    bytes_compressed: int
    bytes_dense: int
    times_fewer_bytes: float
    exact_steps: int
    seconds: dict[str, float]
    nonfinite: int
    verified: int


class Hidden(TypedDict):
    """What :class:`.overlap.Overlap` counts.

    Attributes:
        overlap: the share of the exchange time that the backward pass hides, 0 to 1.
        overlap_seconds: what it is computed from.
    """

    overlap: float
    overlap_seconds: OverlapSeconds


class AtAnyTime(Counted, Hidden):
    """What can be read at any time."""


class Stats(AtAnyTime):
    """What ``stats()`` returns.

    Attributes:
        residual_norm: the norm of what waits.
        buckets, plain_buckets: number of all, and of those that the schedule leaves uncompressed.
        collectives: those in use.
        tuned: no search for buckets is in progress.
        method: its name.
        norm_ratio: what compressed gradients are handed back times, so that they have the norm of the exact mean.
        gradient_norm: that norm, as last measured; 0 before that.
    """

    residual_norm: float
    buckets: int
    collectives: list[str]
    plain_buckets: int
    tuned: bool
    method: str
    norm_ratio: float
    gradient_norm: float
