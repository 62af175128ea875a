"""The value that names one stream of random bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Purposes keep streams of one (step, bucket, rank, hop) apart.
MERGE, ZERO_SIGN, DITHER, SKETCH, SAMPLE, FACTOR, TIE, NORM, ORDER, KEPT = 0, 1, 2, 3, 4, 5, 8, 9, 10, 11

_LIMITS = {"step": 1 << 32, "bucket": 1 << 16, "rank": 1 << 16, "hop": 1 << 20, "purpose": 1 << 4, "shift": 1 << 16}


@dataclass(frozen=True, slots=True)
class Key:
    """Names one Philox4x32-10 stream: equal keys give equal bits on every device.

    The 64-bit ``seed`` is the Philox key. The counter is made of the other fields without
    hashing, so that two different keys can never share a random number:

    ====  =========================================
    word  content
    ====  =========================================
    c0    index of the 128-bit group in the bucket
    c1    purpose (4 bits) | hop (20) | digit (8)
    c2    step (32)
    c3    bucket (16) | rank (16)
    ====  =========================================

    ``shift`` makes no other stream: it moves numbers of 16 bits, as they are drawn for rounding, modulo 2^16.

    Raises:
        ValueError: a field does not fit its bits.
    """

    seed: int
    step: int
    bucket: int
    rank: int
    hop: int = 0
    purpose: int = MERGE
    shift: int = 0

    def __post_init__(self) -> None:
        small = (self.hop | self.rank | self.bucket | self.step | self.shift) >> 16 == 0  # none is negative either
        if small and self.purpose >> 4 == 0:  # as most often: several keys are made in each step of a bucket
            return
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if not 0 <= value < limit:
                raise ValueError(f"Key.{name} must be in [0, {limit}), got {value}")

    def at(self, **changes: int) -> Key:
        """Return this key with some fields changed."""
        return replace(self, **changes)

    def words(self) -> tuple[int, int, int, int, int, int]:
        """Return (k0, k1, c1, c2, c3, shift) as unsigned 32-bit integers, with digit 0 in c1."""
        seed = self.seed & 0xFFFFFFFFFFFFFFFF
        return (
            seed & 0xFFFFFFFF,
            seed >> 32,
            self.purpose << 28 | self.hop << 8,
            self.step,
            self.bucket << 16 | self.rank,
            self.shift,
        )
