"""A method whose bucket travels uncompressed, because compressing it costs more than it saves."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..schedule.plan import Bucket
from .base import Algebra, Codec
from .dense import FullPrecision, Uncompressed
from .work import dtype_of, work_dtype


@dataclass(frozen=True)
class LeftPlain(Codec):
    """Every round is plain: it sends what waits in the residual too, which is empty from then on.

    What the method keeps stays its own, so the bucket can be compressed again in any later step.

    Args:
        codec: the method; one that :meth:`~horovod_compress.codecs.base.Codec.may_be_plain`.
        keeps: whether it keeps something for the elements of the bucket.
    """

    codec: Codec
    keeps: bool

    name: ClassVar[str] = "left plain"
    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "a method's bucket, uncompressed"

    def config(self) -> dict[str, Any]:
        return self.codec.config()

    def state(self, bucket: Bucket) -> dict[str, torch.dtype]:
        return self.codec.state(bucket)

    def sees(self, variant: Codec, bucket: Bucket) -> Collection[str]:
        return self.state(bucket)

    def at(self, step: int) -> Codec:
        # A residual is of float32 at least, and would be rounded to the gradients' own type.
        return FullPrecision() if self.keeps else Uncompressed()

    def plain_when_empty(self, bucket: Bucket) -> bool:
        return self.keeps and dtype_of(bucket) is work_dtype(bucket)

    def variants(self) -> tuple[Codec, ...]:
        return (self.at(0),)
