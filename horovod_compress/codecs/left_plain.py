"""A method whose bucket travels uncompressed, because compressing it costs more than it saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..schedule.plan import Bucket
from .base import Algebra, Codec, Properties
from .dense import FullPrecision, Uncompressed
from .layout import Layout
from .work import dtype_of, work_dtype


@dataclass(frozen=True)
class LeftPlain(Codec):
    """Every round is plain: it sends what waits in the residual too, which is empty from then on.

    What the method keeps stays its own, so the bucket can be compressed again in any later step.

    Args:
        codec: the method; one that may be plain, see :class:`~horovod_compress.codecs.base.Properties`.
        keeps: whether it keeps something for the elements of the bucket.
    """

    codec: Codec
    keeps: bool

    name: ClassVar[str] = "left plain"
    algebra: ClassVar[Algebra] = Algebra.SUM
    summary: ClassVar[str] = "a method's bucket, uncompressed"

    def properties(self) -> Properties:
        return Properties(variants=(self.for_step(0),))

    def layout(self, bucket: Bucket, world: int) -> Layout:
        return Layout(state=self.codec.layout(bucket, world).state)

    def for_step(self, step: int, *, compressed: bool = False) -> Codec:
        # A residual is of float32 at least, and would be rounded to the gradients' own type.
        return FullPrecision() if self.keeps else Uncompressed()

    def plain_when_empty(self, bucket: Bucket) -> bool:
        """Return whether rounds send gradients as they are while nothing waits, which is after any round."""
        return self.keeps and dtype_of(bucket) is work_dtype(bucket)
