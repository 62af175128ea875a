"""A codec's part of one exchange, chunk by chunk: it encodes, merges, and hands on what can be decoded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...codecs.base import Codec
from ...codecs.work import Part, Work
from ...exchange.collective import FramePiece
from ...exchange.wire import NonFiniteCount
from ...ops.keys import Key

#: Takes parts of a bucket.
Take = Callable[[list[Part]], None]
#: Returns a context to encode parts in.
Encoding = Callable[[], contextlib.AbstractContextManager[object]]
#: Parts of a bucket by chunk.
Parts = Mapping[int, list[Part]]


def nothing(parts: list[Part]) -> None:
    """Take no notice."""


def present(work: Work, parts: list[Part]) -> list[Part]:
    """Return the parts of gradients that were submitted: sparse ones are not."""
    return [part for part in parts if work.grads[part.position] is not None]


@dataclass(frozen=True)
class CodecReduction:
    """A :class:`~horovod_compress.exchange.collective.Reduction` with the key of this rank, step and bucket.

    Attributes:
        to_encode: what has to be encoded before each chunk is sent.
        parts: what each chunk makes ready to be decoded.
        encoding: makes the context that parts are encoded in, while earlier ones are on their way.
        ready: called with the parts of the result that can be decoded while the exchange goes on; never, if a value
            of any rank is not finite.
    """

    codec: Codec
    work: Work
    key: Key
    to_encode: Parts = field(default_factory=dict)
    parts: Parts = field(default_factory=dict)
    encoding: Encoding = contextlib.nullcontext
    ready: Take = nothing

    def prepare(self, chunk: int) -> None:
        if chunk in self.to_encode:
            with self.encoding():
                self.codec.encode(self.work, present(self.work, self.to_encode[chunk]), self.key)

    def merge(self, piece: FramePiece, other: Tensor, weights: tuple[int, int], hop: int) -> None:
        self.codec.combine(self.work, piece, other, weights, self.key.at(hop=hop))

    def fold(self, piece: FramePiece, others: Sequence[Tensor]) -> None:
        self.codec.fold(self.work, piece, others, self.key)

    def complete(self, chunk: int, bad: NonFiniteCount) -> None:
        if chunk in self.parts and not bad.count:
            self.ready(self.parts[chunk])
