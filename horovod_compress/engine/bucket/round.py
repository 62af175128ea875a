"""One kind of round of a bucket: everything that is asked of its codec on a gradient's way, in the order of that way.

submit   one gradient, or all at once where a device takes them together
encode   what needs the whole bucket; before it, the preludes
exchange the payload; parts are encoded and handed on for decoding meanwhile
decode   the result, whole or part by part, over the gradients
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...codecs.base import Codec, Properties
from ...codecs.dense import Dense
from ...codecs.work import Part, Work
from ...exchange import all_gatherv, on_device
from ...exchange.base import Collective, Exchange, Reduction
from ...exchange.deadline import Deadline
from ...exchange.layout import Layout
from ...exchange.wire import NonFiniteCount
from ...ops.dispatch import as_tensor
from ...ops.keys import Key
from .reduction import CodecReduction, Encoding, Take, nothing, present
from .staging import StagedGather, Staging


@dataclass(frozen=True)
class Prelude:
    """An exchange before the payload's."""

    layout: Layout
    collective: Collective
    staging: Staging | None  # where it is exchanged from host memory of its own

    def run(self, exchange: Exchange, reduction: Reduction) -> NonFiniteCount:
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
    inbox: all_gatherv.Inbox | on_device.Mailbox | None = None  # where payloads are gathered
    staging: Staging | None = None  # where the payload is exchanged from host memory of its own
    gather: StagedGather | None = None  # likewise, where payloads are gathered
    waits: bool = False  # whether gradients wait for the last one, to be submitted together

    @property
    def exact(self) -> bool:
        """Whether gradients are sent as plain numbers."""
        return isinstance(self.codec, Dense)

    # ---- submit ----

    @property
    def divided(self) -> bool:
        """Whether gradients are to be divided before the codec has them, where there is something to divide by."""
        return self.properties.divides == "before" and not self.codec.divides_itself

    @property
    def wire(self) -> torch.dtype | None:
        """What numbers are sent as; None where they are coded."""
        return self.codec.wire_dtype(self.work.bucket) if isinstance(self.codec, Dense) else None

    def submit(self, position: int, key: Key) -> int | Tensor:
        """Hand one gradient to the codec; return how many of its values are not finite."""
        (count,) = self.codec.submit(self.work, [position], key)
        return count

    def submit_all(self, positions: list[int], key: Key) -> Tensor:
        """Hand several gradients to the codec at once; return their counts."""
        counts = self.codec.submit(self.work, positions, key)
        return counts if isinstance(counts, Tensor) else as_tensor([int(count) for count in counts])

    # ---- encode ----

    def before(self, number: int, key: Key) -> dict[int, int] | None:
        """Fill the arrays of a prelude; return what was counted late, by position."""
        return self.codec.before(number, self.work, key)

    def encode(self, key: Key) -> dict[int, int] | None:
        """Finish the payload, but for the parts that are encoded while earlier ones are on their way."""
        counts = self.codec.before(len(self.preludes), self.work, key)
        if not self.to_encode:
            self.codec.encode(self.work, self.whole(), key)
        return counts

    def whole(self) -> list[Part]:
        """Return all that was submitted."""
        return [Part(position, 0, self.work.grad(position).numel()) for position in self.work.present()]

    # ---- exchange ----

    def reduction(self, key: Key) -> Reduction:
        """Return what the collective of a prelude needs of the codec.

        The key is one of rank 0, as a reduction that every rank does by itself may not depend on
        the rank; and no chunk of a prelude makes a part of the result ready.
        """
        return CodecReduction(self.codec, self.work, key.at(rank=0))

    def exchange(
        self, exchange: Exchange, key: Key, encoding: Encoding = contextlib.nullcontext, ready: Take = nothing
    ) -> NonFiniteCount:
        """Exchange the payload; return the non-finite count over all ranks.

        Args:
            encoding, ready: see :class:`CodecReduction`.
        """
        if self.inbox is not None:
            bad, self.work.gathered = self._gather(exchange, self.inbox)
            return bad
        reduction = CodecReduction(self.codec, self.work, key, self.to_encode, self.parts, encoding, ready)
        return self.collective.run(exchange, self.layout, _around(self.staging, reduction, exchange.deadline))

    def _gather(
        self, exchange: Exchange, inbox: all_gatherv.Inbox | on_device.Mailbox
    ) -> tuple[NonFiniteCount, list[Tensor]]:
        own = self.work.regions["payload"][: self.work.used]
        if isinstance(inbox, on_device.Mailbox):
            return inbox.run(exchange, own)
        if self.gather is None:
            return all_gatherv.run(exchange, own, inbox)
        bad, gathered = all_gatherv.run(exchange, self.gather.fetch(own, exchange.deadline), inbox)
        return bad, self.gather.put(own, gathered)

    # ---- decode ----

    def decode(self, parts: list[Part], key: Key, result_scale: float) -> None:
        """Decode parts of the result, and give them the size of gradients again; sparse gradients are left out."""
        parts = present(self.work, parts)
        self.codec.decode(self.work, parts, key, result_scale)
        for part in parts if self.divided and self.work.divisors else ():
            if (divisor := self.work.divisors.get(part.position)) is not None:
                self.work.grad(part.position)[part.start : part.stop].mul_(divisor[part.start : part.stop])

    def keep(self) -> None:
        """Keep what merging left, of a round whose result is good on every rank."""
        for carry in self.work.carry.values():
            carry.keep()


def _around(staging: Staging | None, reduction: Reduction, deadline: Deadline) -> Reduction:
    return staging.around(reduction, deadline) if staging else reduction
