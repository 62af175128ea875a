"""One kind of round of a bucket: everything that is asked of its codec on a gradient's way, in the order of that way.

offer    one gradient, or all at once where a device takes them together
encode   what needs the whole bucket; before it, the preludes
exchange the payload; parts are encoded and handed on for decoding meanwhile
decode   the result, whole or part by part, over the gradients
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from torch import Tensor

from ...codecs.base import Codec
from ...codecs.properties import Properties
from ...codecs.work import Part, Work
from ...exchange import on_device, ragged
from ...exchange.base import Collective, Exchange, Reduction
from ...exchange.deadline import Deadline
from ...exchange.layout import Layout
from ...exchange.wire import Bad
from ...ops.keys import Key
from .reduction import CodecReduction, Encoding, Take, nothing, present
from .staging import StagedGather, Staging


@dataclass(frozen=True)
class Prelude:
    """An exchange before the payload's."""

    layout: Layout
    collective: Collective
    staging: Staging | None  # where it is exchanged from host memory of its own

    def run(self, exchange: Exchange, reduction: Reduction) -> Bad:
        """Exchange the arrays; return the non-finite count over all ranks, which is that of a whole bucket."""
        return self.collective.run(exchange, self.layout, _around(self.staging, reduction, exchange.deadline))


@dataclass(frozen=True)
class Round:
    """What one kind of round needs: some methods have compressed and full-precision rounds."""

    codec: Codec
    properties: Properties
    label: str  # names the kind of round in frames
    work: Work
    collective: Collective
    preludes: tuple[Prelude, ...] = ()
    layout: Layout = field(kw_only=True)
    to_encode: dict[int, list[Part]] = field(default_factory=dict)  # what has to be encoded before each chunk is sent
    parts: dict[int, list[Part]] = field(default_factory=dict)  # what each chunk makes ready to be decoded
    inbox: ragged.Inbox | on_device.Mailbox | None = None  # where payloads are gathered
    staging: Staging | None = None  # where the payload is exchanged from host memory of its own
    gather: StagedGather | None = None  # likewise, where payloads are gathered

    # ---- offer ----

    @property
    def divided(self) -> bool:
        """Whether gradients are divided before they are encoded, where there is something to divide by."""
        return self.properties.divides == "before"

    def offer(self, position: int, key: Key) -> int | Tensor:
        """Hand one gradient to the codec; return how many of its values are not finite."""
        if self.work.together:
            return self.offer_all([position], key)
        return self.codec.offer(self.work, position, key)

    def offer_all(self, positions: list[int], key: Key) -> Tensor:
        """Hand several gradients to the codec at once; return their counts."""
        return self.codec.offer_all(self.work, positions, key)

    # ---- encode ----

    def begin(self, number: int, key: Key) -> dict[int, int] | None:
        """Fill the arrays of a prelude; return what was counted late, by position."""
        return self.codec.begin(number, self.work, key)

    def encode(self, key: Key) -> dict[int, int] | None:
        """Finish the payload, but for the parts that are encoded while earlier ones are on their way."""
        if not self.to_encode:
            return self.codec.encode(self.work, key)
        self.codec.encode_first(self.work, key)
        return None

    # ---- exchange ----

    def before(self, key: Key) -> Reduction:
        """Return what the collective of a prelude needs of the codec.

        The key is one of rank 0, as a reduction that every rank does by itself may not depend on
        the rank; and no chunk of a prelude makes a part of the result ready.
        """
        return CodecReduction(self.codec, self.work, key.at(rank=0))

    def exchange(
        self, exchange: Exchange, key: Key, encoding: Encoding = contextlib.nullcontext, ready: Take = nothing
    ) -> Bad:
        """Exchange the payload; return the non-finite count over all ranks.

        Args:
            encoding, ready: see :class:`CodecReduction`.
        """
        if self.inbox is not None:
            bad, self.work.gathered = self._gather(exchange, self.inbox)
            return bad
        reduction = CodecReduction(self.codec, self.work, key, self.to_encode, self.parts, encoding, ready)
        return self.collective.run(exchange, self.layout, _around(self.staging, reduction, exchange.deadline))

    def _gather(self, exchange: Exchange, inbox: ragged.Inbox | on_device.Mailbox) -> tuple[Bad, list[Tensor]]:
        own = self.work.regions["payload"][: self.work.used]
        if isinstance(inbox, on_device.Mailbox):
            return inbox.run(exchange, own)
        if self.gather is None:
            return ragged.run(exchange, own, inbox)
        bad, gathered = ragged.run(exchange, self.gather.fetch(own, exchange.deadline), inbox)
        return bad, self.gather.put(own, gathered)

    # ---- decode ----

    def decode(self, key: Key, gain: float) -> None:
        """Decode the whole result at once."""
        self.codec.decode(self.work, key, gain)
        self._multiply([Part(p, 0, self.work.grad(p).numel()) for p in self.work.present()])

    def decode_parts(self, parts: list[Part], key: Key, gain: float) -> None:
        """Decode parts of the result; those of sparse gradients are left out."""
        parts = present(self.work, parts)
        self.codec.decode_parts(self.work, parts, key, gain)
        self._multiply(parts)

    def _multiply(self, parts: list[Part]) -> None:
        """Give decoded parts the size of gradients again."""
        if not self.divided or not self.work.divisors:
            return
        for part in parts:
            if (divisor := self.work.divisors.get(part.position)) is not None:
                self.work.grad(part.position)[part.start : part.stop].mul_(divisor[part.start : part.stop])

    def keep(self) -> None:
        """Keep what merging left, of a round whose result is good on every rank."""
        for carry in self.work.carry.values():
            carry.keep()


def _around(staging: Staging | None, reduction: Reduction, deadline: Deadline) -> Reduction:
    return staging.around(reduction, deadline) if staging else reduction
