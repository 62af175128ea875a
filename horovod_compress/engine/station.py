"""One bucket's place in the reducer: its buffers, and how far it is in this step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from ..codecs.base import Algebra, Codec, Divides, Part, Regions, Work
from ..codecs.carry import carries
from ..codecs.dense import BFloat, Uncompressed
from ..errors import HorovodCompressError
from ..exchange import everywhere, on_device, ragged
from ..exchange.base import Collective, Exchange, Reduction
from ..exchange.choose import Choose, for_prelude
from ..exchange.deadline import Deadline
from ..exchange.device import Host, Mark
from ..exchange.layout import Layout, Piece, chunk_bounds
from ..exchange.transports.nccl import Link
from ..exchange.wire import Bad
from ..ops.keys import Key
from ..schedule.plan import Bucket
from . import spoilt
from .arrivals import decoded_by_chunk, encoded_by_chunk
from .staging import StagedGather, Staging

#: Gradients below are never refused for being too large: half of what rules/kept.h allows with a residual.
_HUGE = 2.0**95
_CPU = Host()
_AS_IT_IS = Uncompressed()
#: Takes parts of a bucket.
Take = Callable[[list[Part]], None]


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
    label: str  # names the kind of round in frames
    work: Work
    layout: Layout
    collective: Collective
    to_encode: dict[int, list[Part]]  # what has to be encoded before each chunk is sent
    parts: dict[int, list[Part]]  # what each chunk makes ready to be decoded
    preludes: tuple[Prelude, ...]
    inbox: ragged.Inbox | on_device.Mailbox | None  # where payloads are gathered
    staging: Staging | None  # where the payload is exchanged from host memory of its own
    gather: StagedGather | None  # likewise, where payloads are gathered

    def offer(self, position: int, key: Key) -> int | Tensor:
        """Hand one gradient to the codec."""
        if self.work.together:
            return self.codec.offer_all(self.work, [position], key)
        return self.codec.offer(self.work, position, key)

    def encode(self, key: Key) -> dict[int, int] | None:
        """Finish the payload, but for the parts that are encoded while earlier ones are on their way."""
        if not self.to_encode:
            return self.codec.encode(self.work, key)
        self.codec.encode_first(self.work, key)
        return None

    def encode_parts(self, parts: list[Part], key: Key) -> None:
        """Encode parts; those of sparse gradients are left out."""
        self.codec.encode_parts(self.work, self._present(parts), key)

    def exchange(self, exchange: Exchange, key: Key, due: Take, ready: Take) -> Bad:
        """Exchange the payload; return the non-finite count over all ranks.

        Args:
            due: called with the parts that have to be encoded now.
            ready: called with the parts of the result that can be decoded while the exchange goes
                on; never, if a value of any rank is not finite.
        """
        if self.inbox is None:
            reduction = _CodecReduction(self.codec, self.work, key, self.to_encode, self.parts, due, ready)
            return self.collective.run(exchange, self.layout, _around(self.staging, reduction, exchange.deadline))
        own = self.work.regions["payload"][: self.work.used]
        if isinstance(self.inbox, on_device.Mailbox):
            bad, self.work.gathered = self.inbox.run(exchange, own)
            return bad
        if self.gather is None:
            bad, self.work.gathered = ragged.run(exchange, own, self.inbox)
            return bad
        bad, gathered = ragged.run(exchange, self.gather.fetch(own, exchange.deadline), self.inbox)
        self.work.gathered = self.gather.put(own, gathered)
        return bad

    def before(self, key: Key) -> Reduction:
        """Return what the collective of a prelude needs of the codec.

        The key is one of rank 0, as a reduction that every rank does by itself may not depend on
        the rank; and no chunk of a prelude makes a part of the result ready.
        """
        return _CodecReduction(self.codec, self.work, key.at(rank=0), {}, {}, nothing, nothing)

    def decode(self, parts: list[Part], key: Key, gain: float) -> None:
        """Decode parts of the result; those of sparse gradients are left out."""
        present = self._present(parts)
        self.codec.decode_parts(self.work, present, key, gain)
        self._multiply(present)

    def decode_all(self, key: Key, gain: float) -> None:
        """Decode the whole result at once."""
        self.codec.decode(self.work, key, gain)
        self._multiply([Part(p, 0, self.work.grad(p).numel()) for p in self.work.present()])

    def _multiply(self, parts: list[Part]) -> None:
        """Give decoded parts the size of gradients again."""
        if self.codec.divides() != "before" or not self.work.divisors:
            return
        for part in parts:
            if (divisor := self.work.divisors.get(part.position)) is not None:
                self.work.grad(part.position)[part.start : part.stop].mul_(divisor[part.start : part.stop])

    def keep(self) -> None:
        """Keep what merging left, of a round whose result is good on every rank."""
        for carry in self.work.carry.values():
            carry.keep()

    def _present(self, parts: list[Part]) -> list[Part]:
        return [part for part in parts if self.work.grads[part.position] is not None]


def _around(staging: Staging | None, reduction: Reduction, deadline: Deadline) -> Reduction:
    return staging.around(reduction, deadline) if staging else reduction


@dataclass(frozen=True)
class _CodecReduction:
    """A codec's merge with the key of this rank, step and bucket."""

    codec: Codec
    work: Work
    key: Key
    to_encode: dict[int, list[Part]]
    parts: dict[int, list[Part]]
    due: Take
    ready: Take

    def prepare(self, chunk: int) -> None:
        if chunk in self.to_encode:
            self.due(self.to_encode[chunk])

    def complete(self, chunk: int, bad: Bad) -> None:
        if chunk in self.parts and not bad.count:
            self.ready(self.parts[chunk])

    def merge(self, piece: Piece, other: Tensor, weight: int, hop: int) -> None:
        weights = (1, weight)
        key = self.key.at(hop=hop)
        self.codec.merge_in(self.work, piece.region, piece.start, piece.values, other, weights, key)

    def fold(self, piece: Piece, others: Sequence[Tensor]) -> None:
        self.codec.fold_in(self.work, piece.region, piece.start, piece.values, others, self.key, piece.result)


class Station:
    """The buffers and the state of one bucket.

    ``offer`` runs without the reducer's lock, between ``claim`` and ``count_in``, which need it.
    """

    def __init__(
        self,
        bucket: Bucket,
        codec: Codec,
        rank: int,
        world: int,
        collective: Choose,
        device: Host = _CPU,
        staged: bool = False,
        link: Link | None = None,
    ) -> None:
        codec.check_world(world)
        self.bucket, self._codec, self.device = bucket, codec, device
        self._staged = staged and world > 1  # whether payloads are exchanged from copies in host memory
        self._link = link if world > 1 else None  # or from where they are
        self._rank, self._world, self._choose = rank, world, collective
        self.grads: list[Tensor | None] = [None] * len(bucket.tensors)  # flat
        self._originals: list[Tensor | None] = []
        self._claimed: list[bool] = []
        #: What is kept from step to step, for every element and for the bucket as a whole.
        self.state = self._allocate({n: (d, bucket.padded) for n, d in codec.state(bucket).items()}, _folded(codec))
        self.tables = self._allocate(codec.tables(bucket))
        self._momenta: dict[int, list[Tensor]] = {}
        #: By position, what gradients are divided by before they are encoded; see Codec.divides.
        self.divisors: dict[int, Tensor] = {}
        self._payload = payload = self._payload_for(codec.variants())
        # A bucket has one round at a time, so the kinds of rounds share what is not kept between them.
        self._scratch = device.zeros(_scratch_nbytes(codec.variants(), bucket), torch.uint8)
        self._inbox, self._gather = self._inbox_for(codec.variants())
        labels = _labels(codec.variants())
        self._rounds = {c: self._make_round(c, labels[c], payload, self.state) for c in codec.variants()}
        self._plain: Round | None = None
        self._turn: int | None = None  # see :meth:`set_turn`
        self._is_plain = False
        self._nothing_waits = False  # see :meth:`note_emptied`
        if codec.plain_when_empty(bucket):
            self._make_plain()
        #: How many kept values were dropped as they were not finite, by tensor; see :meth:`drop_spoilt`.
        self.dropped: dict[str, int] = {}
        #: The last step whose result is ready.
        self.finished = -1
        #: How far that is on a device, for whoever goes on with it.
        self.decoded: Mark = None
        # Where their counts are fetched to, once for all steps: memory that a device copies to takes long to get.
        self._fetched = device.host_zeros(len(bucket.tensors) if device.apart else 0, torch.int64)
        self._offered: dict[int, Mark] = {}  # how far the streams are that gradients were offered on
        #: What the results of this step are multiplied by, see Codec.decode; None if not yet known.
        self.gain: float | None = 1.0
        self._reset()

    # ---- memory ----

    def _allocate(self, regions: Regions, on_host: Collection[str] = ()) -> dict[str, Tensor]:
        """Return arrays on the device, but for some that payloads are merged with where they are exchanged."""
        staged = on_host if self._staged else ()
        return {
            name: torch.zeros(count, dtype=dtype) if name in staged else self.device.zeros(count, dtype)
            for name, (dtype, count) in regions.items()
        }

    def _payload_for(self, codecs: Sequence[Codec]) -> _Payload:
        """Return memory for the largest payload; the rounds of a method share it."""
        nbytes = max(self._nbytes_of(codec) for codec in codecs)
        reduced = [self._nbytes_of(codec) for codec in codecs if codec.algebra is not Algebra.GATHER]
        host = self.device.host_zeros(max(reduced, default=0), torch.uint8) if self._staged else None
        return _Payload(self.device.zeros(nbytes, torch.uint8), host)

    def _nbytes_of(self, codec: Codec) -> int:
        """Return what a payload and its results take."""
        return _nbytes(codec.regions(self.bucket)) + _nbytes(codec.results(self.bucket))

    def _make_round(self, codec: Codec, label: str, payload: _Payload, state: dict[str, Tensor]) -> Round:
        world = self._world
        sent = codec.regions(self.bucket)
        regions = _carve(payload.memory, sent)
        arrays = codec.local(self.bucket)
        local = _carve(self._scratch, arrays) if codec.local_is_scratch else self._allocate(arrays, codec.folded)
        shared = [self._allocate(arrays) for arrays in codec.preludes(self.bucket)]
        every = {name: array for arrays in shared for name, array in arrays.items()}
        own = {name: kept for name, kept in state.items() if name in self._codec.sees(codec, self.bucket)}
        work = Work(self.bucket, world, self.grads, own, self.tables, regions, every, local)
        work.momenta, work.together = self._momenta, self.device.apart and codec.offers_together()
        work.divisors = self.divisors
        codec.prepare(work)
        nbytes = sum(tensor.nbytes for tensor in regions.values())
        preludes = tuple(self._prelude(arrays) for arrays in shared)
        collective = self._choose(codec, nbytes, world, {region.dtype for region in regions.values()})
        if self._link and codec.algebra is not Algebra.GATHER:
            collective = on_device.of(collective)
        if codec.algebra is Algebra.GATHER:
            assert self._inbox is not None
            layout, inbox = Layout.of(regions, world, codec.records()), self._inbox.of(nbytes)
            return Round(codec, label, work, layout, collective, {}, {}, preludes, inbox, None, self._gather)
        self._make_carry(codec, work, collective)
        order = collective.needed(self._rank, world)
        results = codec.results(self.bucket) if collective.name == "fold" and world > 1 else {}
        work.results = _carve(payload.memory[_nbytes(sent) :], results)
        on_host = _carve(payload.host[_nbytes(sent) :], results) if payload.host is not None else work.results
        staging = self._staging(regions, payload.host, order, codec.records(), _paired(work.results, on_host))
        layout = Layout.of(staging.host if staging else regions, world, codec.records(), on_host)
        to_encode = encoded_by_chunk(codec, work, order)
        parts = decoded_by_chunk(codec, work, collective.order(self._rank, world))
        return Round(codec, label, work, layout, collective, to_encode, parts, preludes, None, staging, None)

    def _make_carry(self, codec: Codec, work: Work, collective: Collective) -> None:
        """Let merging keep what it keeps where payloads are exchanged, for the elements that this rank merges."""
        rows, device = codec.carries(self._world), torch.device("cpu") if self._staged else self.device.where
        owns = collective.name == "fold"  # else it merges one hop's share of every chunk but one
        records = codec.records()
        spans = {
            name: chunk_bounds(count, self._rank, self._world, records.get(name, 1)) if owns else (0, count)
            for name, count in ((name, work.regions[name].numel()) for name in rows)
        }
        work.carry = carries(rows, work.regions, spans, device)

    def carry(self) -> dict[str, Tensor]:
        """Return what merging keeps, by what it belongs to."""
        rounds = self._rounds.values()
        kept = [(f"{r.label} {name} {r.collective.name}", c.kept) for r in rounds for name, c in r.work.carry.items()]
        return dict(kept)

    def _staging(
        self,
        arrays: dict[str, Tensor],
        host: Tensor | None,
        order: list[int],
        records: dict[str, int],
        results: dict[str, tuple[Tensor, Tensor]] | None = None,
    ) -> Staging | None:
        """Return the copy of some arrays in host memory, if they are exchanged from there."""
        if host is None:
            return None
        regions = {name: (array.dtype, array.numel()) for name, array in arrays.items()}
        return Staging(self.device, arrays, _carve(host, regions), order, records, results)

    def _prelude(self, arrays: dict[str, Tensor]) -> Prelude:
        # Larger elements first, so that every array is aligned within a frame.
        arrays = dict(sorted(arrays.items(), key=lambda named: -named[1].element_size()))
        collective = for_prelude(sum(array.nbytes for array in arrays.values()), self._world)
        chunks = 1 if collective is everywhere else self._world
        nbytes = _nbytes({name: (array.dtype, array.numel()) for name, array in arrays.items()})
        host = self.device.host_zeros(nbytes, torch.uint8) if self._staged else None
        staging = self._staging(arrays, host, collective.needed(self._rank, self._world), {})
        collective = on_device.of(collective) if self._link else collective
        return Prelude(Layout.of(staging.host if staging else arrays, chunks), collective, staging)

    def _inbox_for(
        self, variants: Sequence[Codec]
    ) -> tuple[ragged.Inbox | on_device.Mailbox | None, StagedGather | None]:
        """Return memory for the largest payloads that are gathered."""
        regions = [codec.regions(self.bucket) for codec in variants if codec.algebra is Algebra.GATHER]
        sizes = [sum(dtype.itemsize * count for dtype, count in arrays.values()) for arrays in regions]
        if not sizes:
            return None, None
        if self._link:
            return on_device.Mailbox(self._link, max(sizes)), None
        inbox = ragged.Inbox(self._rank, self._world, max(sizes))
        staged = StagedGather(self.device, self._rank, self._world, max(sizes)) if self._staged else None
        return inbox, staged

    def _reset(self) -> None:
        number = len(self.grads)
        self.grads[:] = [None] * number
        self._originals = [None] * number
        self._started = self._count = 0
        self._waiting: list[int] = []  # offered, and to be handed to the codec with the last one
        self.refused: BaseException | None = None  # why the codec could not take them
        self._counts: list[tuple[list[int], Tensor]] = []  # of values that are not finite, not read yet
        self._zeroed = [0] * number  # values that were not finite and count as 0, by position
        #: Seconds that parts of the result took to decode so far.
        self.decoding = 0.0
        #: Whether the exchange has begun.
        self.taken = False
        self.bad = Bad()
        self.bad_names: list[str] = []
        self.error: HorovodCompressError | None = None

    # ---- one step ----

    @property
    def full(self) -> bool:
        """Whether every tensor of the bucket was offered, and the bucket waits for its exchange."""
        return self._count == len(self.grads) and not self.taken and not self._waiting

    @property
    def waits(self) -> bool:
        """Whether every tensor was offered, and the codec has not been given those that waited for the last one."""
        return self._count == len(self.grads) and bool(self._waiting)

    @property
    def busy(self) -> bool:
        """Whether the bucket is anywhere between its first offer and its result."""
        return self._started > 0

    def round(self, step: int) -> Round:
        if self._plain and (self._is_plain or self._nothing_waits):
            return self._plain
        return self._rounds[self._codec.at(step if self._turn is None else self._turn)]

    def _make_plain(self, codec: Codec = _AS_IT_IS) -> None:
        fits = self._payload.holds(self._nbytes_of(codec))
        self._plain = self._make_round(codec, codec.name, self._payload if fits else self._payload_for((codec,)), {})
        self.device.rest()  # between two steps nothing is under way

    def set_turn(self, number: int | None, plain: bool) -> None:
        """Choose what the coming steps exchange; between two steps, on every rank alike.

        Args:
            number: stands for the step where a method's rounds differ by it; None for the step.
            plain: exchange what is offered as it is, without this method and its state.
        """
        if plain and not self._plain:
            self._make_plain()
        self._turn, self._is_plain = number, plain

    def hold(self, step: int, exact: bool) -> None:
        """Choose what the coming step exchanges beside a second moment that is held; on every rank alike.

        Args:
            exact: it sends gradients without this method and its state, float32 as bfloat16: what a square of the
                second moment is made of need not be known any better.
        """
        if self._codec.divides() == "never":
            return
        if exact and not self._plain:
            self._make_plain(BFloat() if self.bucket.dtype == "float32" else Uncompressed())
        self._turn, self._is_plain = self._codec.compressed_turn(step), exact

    def note_emptied(self) -> None:
        """Take note that a round went well on every rank: nothing waits now, where every round sends all of it."""
        if self._is_plain or self._nothing_waits or not self._codec.plain_when_empty(self.bucket):
            return
        if all(grad is not None for grad in self.grads):  # what was skipped may wait
            self._nothing_waits = True
            # A gradient of -0 plus this is -0: a job that goes on from a checkpoint, and adds it again, has equal bits.
            self.state["residual"].fill_(-0.0)

    def resume(self, step: int) -> None:
        """Go on at a step, with whatever was loaded."""
        self.finished, self._nothing_waits = step - 1, False

    def divides(self) -> Divides:
        """Return where a second moment that is held divides in this bucket's compressed rounds."""
        return self._codec.divides()

    def set_momenta(self, position: int, momenta: list[Tensor]) -> None:
        """See :attr:`horovod_compress.codecs.base.Work.momenta`; flat, one element per gradient element."""
        self._momenta[position] = momenta

    def collective(self, step: int) -> str:
        """Return the name of the collective of one step."""
        return self.round(step).collective.name

    def span(self, position: int) -> slice:
        start = self.bucket.offsets[position]
        return slice(start, start + self.bucket.tensors[position].count)

    def missing(self) -> list[str]:
        """Return the tensors that were not offered in the step under way."""
        if not self._started:
            return [tensor.name for tensor in self.bucket.tensors]
        pairs = zip(self.bucket.tensors, self._claimed, strict=True)
        return [tensor.name for tensor, claimed in pairs if not claimed]

    def claim(self, position: int, gain: float | None) -> bool:
        """Announce an offer; return False if there was one for this tensor in this step already."""
        if not self._started:
            self._reset()  # what nobody fetched of the last step goes
            self._claimed = [False] * len(self.grads)
            self.gain = gain
        if self._claimed[position]:
            return False
        self._claimed[position] = True
        self._started += 1
        return True

    def offer(self, position: int, grad: Tensor, key: Key, zero_nonfinite: bool) -> int | Tensor:
        """Hand one gradient to the codec; return how many of its values are not finite.

        That is a tensor on a device whose streams nobody has to wait for yet. A codec that takes in all tensors
        of a bucket at once is given this one with the last one, by :meth:`offer_waiting`.
        """
        self.device.after(self.decoded)
        flat = grad.contiguous().view(-1)  # reshape() may give a view with gaps
        round_ = self.round(key.step)
        self.grads[position], self._originals[position] = flat, grad
        if round_.codec.divides() == "before" and position in self.divisors:
            flat.div_(self.divisors[position])
        self.device.keep((flat, grad))
        count: int | Tensor = 0
        if round_.work.together and not zero_nonfinite:
            self._waiting.append(position)
        else:
            count = self._hand(round_, position, key, zero_nonfinite)
        self.device.note(self._offered)
        return count

    def leave_out(self, position: int, grad: Tensor) -> None:
        """Take a gradient that is not exchanged in this step, on any rank; its result is 0."""
        self.device.after(self.decoded)
        self._originals[position] = grad.zero_()
        self.device.keep((grad,))
        self.device.note(self._offered)

    def offer_waiting(self, key: Key) -> Tensor:
        """Hand all gradients that waited to the codec, after the streams that they come from."""
        self.device.after(*self._offered.values())
        self._waiting.sort()
        round_ = self.round(key.step)
        counts = round_.codec.offer_all(round_.work, self._waiting, key)
        self.device.note(self._offered)
        return counts

    def count_waiting(self, counts: Tensor) -> None:
        """Finish the offers that waited."""
        self._counts.append((self._waiting, counts))
        self._waiting = []

    def _hand(self, round_: Round, position: int, key: Key, zero_nonfinite: bool) -> int | Tensor:
        flat = round_.work.grad(position)
        if zero_nonfinite and round_.codec.counts_late and ops.count_nonfinite(flat):
            self._zero(position, ~flat.isfinite())
        count = round_.offer(position, key)
        if not self.device.apart and count and self.drop_spoilt(position):
            count = round_.offer(position, key)
        if count and zero_nonfinite:
            self._zero(position, ~flat.isfinite())
            count = round_.offer(position, key)
        if count and zero_nonfinite:  # finite, but too large for this method
            self._zero(position, flat.abs() >= min(_HUGE, torch.finfo(flat.dtype).max))
            count = round_.offer(position, key)
        return count

    def _zero(self, position: int, where: Tensor) -> None:
        """Let some values of a gradient be 0, and count them: by position, as offers may come on several threads."""
        grad = self.grads[position]
        assert grad is not None
        grad.masked_fill_(where, 0.0)
        self._zeroed[position] += int(where.sum())

    def drop_spoilt(self, position: int) -> bool:
        """Drop what waits for a tensor and would spoil this step and all later ones; return whether there was any."""
        found = sum(spoilt.drop(kept[self.span(position)]) for kept in self.state.values())
        if found:
            self.dropped[self.bucket.tensors[position].name] = found
        return found > 0

    def count_in(self, position: int, nonfinite: int | Tensor = 0) -> None:
        """Finish an offer."""
        self._count += 1
        if isinstance(nonfinite, Tensor):
            self._counts.append(([position], nonfinite))
        else:
            self.add_bad({position: nonfinite} if nonfinite else None)

    def take_over(self, deadline: Deadline) -> None:
        """Let this thread go on with a full bucket: after its offers, and with their counts as numbers.

        Raises:
            ExchangeError: the device did not come to its counts before the deadline.
        """
        self.device.after(*self._offered.values())
        self.bad = self.bad.plus(Bad(zeroed=sum(self._zeroed)))
        if not self._counts:
            return
        positions = [position for some, _ in self._counts for position in some]
        counts = [count.view(-1) for _, count in self._counts]
        self.device.keep(counts)
        found = counts[0] if len(counts) == 1 else torch.cat(counts)
        if self.device.apart:
            row = self._fetched[: len(positions)]
            self.device.copy(row, found)  # one copy for all
            self.device.wait(self.device.mark(), deadline)
            found = row
        self.add_bad({position: number for position, number in zip(positions, found.tolist(), strict=True) if number})

    def add_bad(self, counts: dict[int, int] | None) -> None:
        """Note values of this rank that are not finite, by position."""
        for position, count in (counts or {}).items():
            self.bad = self.bad.plus(Bad(count, self._rank + 1))
            self.bad_names.append(self.bucket.tensors[position].name)

    def write_back(self) -> None:
        """Copy results to gradients that are not contiguous; all others were overwritten."""
        for flat, grad in zip(self.grads, self._originals, strict=True):
            if flat is not None and grad is not None and flat.data_ptr() != grad.data_ptr():
                grad.copy_(flat.view(grad.shape))

    def finish(self, step: int) -> None:
        """Mark the results of a step as ready, but for what is queued on the device."""
        self.decoded = self.device.mark()
        self.finished = step
        self._started = self._count = 0
        self.taken = False

    def take(self, position: int) -> Tensor:
        """Return one result and forget it."""
        grad = self._originals[position]
        assert grad is not None
        self.device.after(self.decoded)
        self.grads[position] = self._originals[position] = None
        return grad


def _labels(variants: Sequence[Codec]) -> dict[Codec, str]:
    """Return a label for each kind of round: its name, and a number from the second one of that name on."""
    labels: dict[Codec, str] = {}
    seen: dict[str, int] = {}
    for codec in variants:
        seen[codec.name] = number = seen.get(codec.name, 0) + 1
        labels[codec] = codec.name if number == 1 else f"{codec.name} {number}"
    return labels


def nothing(parts: list[Part]) -> None:
    """Take no notice."""


@dataclass(frozen=True)
class _Payload:
    """Memory for payloads, and that of their copies in host memory, where there are any."""

    memory: Tensor
    host: Tensor | None

    def holds(self, nbytes: int) -> bool:
        """Return whether a payload fits, and its copy."""
        return nbytes <= self.memory.numel() and (self.host is None or nbytes <= self.host.numel())


def _folded(codec: Codec) -> set[str]:
    """Return the state that payloads are merged with."""
    return {name for variant in codec.variants() for name in variant.folded}


def _scratch_nbytes(codecs: Sequence[Codec], bucket: Bucket) -> int:
    """Return the size of the largest local arrays that hold nothing between rounds."""
    return max((_nbytes(codec.local(bucket)) for codec in codecs if codec.local_is_scratch), default=0)


def _nbytes(regions: Regions) -> int:
    return sum(_padded(dtype.itemsize * count) for dtype, count in regions.values())


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


def _paired(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    return {name: (array, second[name]) for name, array in first.items()}


def _carve(memory: Tensor, regions: Regions) -> dict[str, Tensor]:
    """Return typed arrays one behind the other in ``memory``."""
    arrays, at = {}, 0
    for name, (dtype, count) in regions.items():
        nbytes = dtype.itemsize * count
        arrays[name] = memory[at : at + nbytes].view(dtype)
        at += _padded(nbytes)
    return arrays
