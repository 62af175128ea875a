"""One bucket's place in the reducer, and how far it is in this step."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import ops
from ...codecs.base import Codec
from ...errors import HorovodCompressError
from ...exchange.choose import Choose
from ...exchange.deadline import Deadline
from ...exchange.device import Device, Event
from ...exchange.transports.link import NcclLink
from ...ops.keys import Key
from ...schedule.plan import Bucket
from . import spoilt
from .memory import Memory, Site
from .nonfinite import NonFinite
from .offers import Offers
from .round import Round
from .rounds import Rounds

#: Gradients below are never refused for being too large: half of what rules/kept.h allows with a residual.
_HUGE = 2.0**95
_CPU = Device()


class BucketState:
    """The state of one bucket on one rank.

    ``offer`` runs without the reducer's lock, between ``claim`` and ``count_in``, which need it.

    Args:
        staged: whether payloads are exchanged from copies in host memory.
        link: or from where they are.
    """

    def __init__(
        self,
        bucket: Bucket,
        codec: Codec,
        rank: int,
        world: int,
        collective: Choose,
        device: Device = _CPU,
        staged: bool = False,
        link: NcclLink | None = None,
    ) -> None:
        self.bucket, self.device = bucket, device
        alone = world == 1
        site = Site(rank, world, collective, device, staged and not alone, None if alone else link)
        self.memory = Memory(bucket, codec, site)
        self.rounds = Rounds(codec, self.memory)
        self.offers, self.nonfinite = Offers(bucket), NonFinite(bucket, rank, device)
        self._originals: list[Tensor | None] = []
        self._offered: dict[int, Event] = {}  # how far the streams are that gradients were offered on
        #: The last step whose result is ready.
        self.finished = -1
        #: How far that is on a device, for whoever goes on with it.
        self.decoded: Event = None
        #: What the results of this step are multiplied by, see Codec.decode; None if not yet known.
        self.result_scale: float | None = 1.0
        self._reset()

    def _reset(self) -> None:
        number = len(self.bucket.tensors)
        self.memory.grads[:] = [None] * number
        self._originals = [None] * number
        self.offers.reset()
        self.nonfinite.reset()
        #: Seconds that parts of the result took to decode so far.
        self.decoding = 0.0
        self.error: HorovodCompressError | None = None

    def round(self, step: int) -> Round:
        """Return the round of a step."""
        return self.rounds.at(step)

    def resume(self, step: int) -> None:
        """Go on at a step, with whatever was loaded."""
        self.finished = step - 1
        self.rounds.resume()

    # ---- offer ----

    def claim(self, position: int, result_scale: float | None) -> bool:
        """Announce an offer; return False if there was one for this tensor in this step already."""
        if not self.offers.busy:
            self._reset()  # what was not fetched of the last step goes
            self.result_scale = result_scale
        return self.offers.claim(position)

    def offer(self, position: int, grad: Tensor, key: Key, zero_nonfinite: bool) -> int | Tensor:
        """Hand one gradient to the codec; return how many of its values are not finite.

        That is a tensor on a device whose streams need not be waited for yet. A codec that takes in all tensors
        of a bucket at once is given this one with the last one, by :meth:`offer_waiting`.
        """
        self.device.wait_events(self.decoded)
        flat = grad.contiguous().view(-1)  # reshape() may give a view with gaps
        round_ = self.round(key.step)
        self.memory.grads[position], self._originals[position] = flat, grad
        if self.memory.withheld:
            self.memory.withheld.take(position, flat, round_.wire)
        if round_.divided and position in self.memory.divisors:
            flat.div_(self.memory.divisors[position])
        self.device.keep((flat, grad))
        count: int | Tensor = 0
        if round_.waits and not zero_nonfinite:
            self.offers.waiting.append(position)
        else:
            count = self._hand(round_, position, key, zero_nonfinite)
        self.device.record_in(self._offered)
        return count

    def _hand(self, round_: Round, position: int, key: Key, zero_nonfinite: bool) -> int | Tensor:
        flat, zero = round_.work.grad(position), self.nonfinite.let_be_zero
        if zero_nonfinite and round_.codec.counts_late and ops.count_nonfinite(flat):
            zero(position, flat, ~flat.isfinite())
        count = round_.submit(position, key)
        if not self.device.is_accelerator and count and self.drop_spoilt(position):
            count = round_.submit(position, key)
        if count and zero_nonfinite:
            zero(position, flat, ~flat.isfinite())
            count = round_.submit(position, key)
        if count and zero_nonfinite:  # finite, but too large for this method
            zero(position, flat, flat.abs() >= min(_HUGE, torch.finfo(flat.dtype).max))
            count = round_.submit(position, key)
        return count

    def leave_out(self, position: int, grad: Tensor) -> None:
        """Take a gradient that is not exchanged in this step, on any rank; its result is 0."""
        self.device.wait_events(self.decoded)
        self._originals[position] = grad.zero_()
        self.device.keep((grad,))
        self.device.record_in(self._offered)

    def count_in(self, position: int, nonfinite: int | Tensor = 0) -> None:
        """Finish an offer."""
        self.offers.count_in()
        if isinstance(nonfinite, Tensor):
            self.nonfinite.add_unread([position], nonfinite)
        else:
            self.nonfinite.add({position: nonfinite} if nonfinite else None)

    def offer_waiting(self, key: Key) -> Tensor:
        """Hand all gradients that waited to the codec, after the streams that they come from."""
        self.device.wait_events(*self._offered.values())
        self.offers.waiting.sort()
        counts = self.round(key.step).submit_all(self.offers.waiting, key)
        self.device.record_in(self._offered)
        return counts

    def count_waiting(self, counts: Tensor) -> None:
        """Finish the offers that waited."""
        self.nonfinite.add_unread(self.offers.waiting, counts)
        self.offers.waiting = []

    # ---- exchange ----

    def take_over(self, deadline: Deadline) -> None:
        """Let this thread go on with a full bucket: after its offers, and with their counts as numbers.

        Raises:
            ExchangeError: the device did not come to its counts before the deadline.
        """
        self.device.wait_events(*self._offered.values())
        self.nonfinite.read(deadline)

    # ---- result ----

    def drop_spoilt(self, position: int) -> bool:
        """Drop what waits for a tensor and would spoil this step and all later ones; return whether there was any."""
        found = sum(spoilt.drop(kept[self.memory.span(position)]) for kept in self.memory.state.values())
        if found:
            self.nonfinite.dropped[self.bucket.tensors[position].name] = found
        return found > 0

    def keep(self, round_: Round) -> None:
        """Keep what a round leaves whose result is good on every rank."""
        round_.keep()
        self.rounds.note_emptied()
        memory = self.memory
        if memory.withheld:
            for position in round_.work.present():
                kept = [kept[memory.span(position)] for kept in memory.state.values()]
                memory.withheld.keep(position, round_.work.grad(position), kept, round_.wire)

    def write_back(self) -> None:
        """Copy results to gradients that are not contiguous; all others were overwritten."""
        for flat, grad in zip(self.memory.grads, self._originals, strict=True):
            if flat is not None and grad is not None and flat.data_ptr() != grad.data_ptr():
                grad.copy_(flat.view(grad.shape))

    def finish(self, step: int) -> None:
        """Mark the results of a step as ready, but for what is queued on the device."""
        self.decoded = self.device.record_event()
        self.finished = step
        self.offers.finish()

    def take(self, position: int) -> Tensor:
        """Return one result and forget it."""
        grad = self._originals[position]
        assert grad is not None
        self.device.wait_events(self.decoded)
        self.memory.grads[position] = self._originals[position] = None
        return grad
