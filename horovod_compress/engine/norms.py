"""What is handed back has the norm of the exact mean gradient, so that clipping sees a gradient of the right size.

What comes out of a code is larger or smaller than the mean of the gradients: it carries errors whose sum is held back.
So coded results are handed back times a ratio, and a hook before the optimizer's step takes it out again
(:mod:`.optimizer.matching`):

    ratio = norm of the exact mean / norm of what the code makes      one for all coded parameters

It is measured now and then and held in between. In a step that measures, every rank folds its gradients into a few
counters with random signs, a count sketch of one row (Charikar, Chen, Farach-Colton 2002). Sketches add up over ranks,
and the norm of their sum is that of the mean within 1 / sqrt(2 counters). Results are equal on all ranks, so each adds
up the squares of its share of them only. Both travel after the step's last payload, counters in 16 bits, as every rank
sends them to every other; all add them in rank order, so all come to the same ratio. It counts from the next step on.
While every step measures, results are held until the step's own ratio is known.

A gradient's way meets this in ``begin`` and then ``factor``, which a turn takes when it is made (training thread);
``fold`` (where gradients are taken in); ``note`` (exchange thread); ``decoded`` (decoding thread); then ``exchange``
(exchange thread) and ``settle`` (decoding thread).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..exchange import everywhere
from ..exchange.device import Deadline, Device
from ..exchange.wire import NonFiniteCount
from ..ops.keys import NORM
from .buckets import Buckets, BucketState
from .context import Context
from .ratio import BEYOND, Ratio
from .turn import Turn

#: Counters, and those of a job with more ranks than :data:`SMALL_JOB`: every rank sends them to every other.
COUNTERS, FEW_COUNTERS, SMALL_JOB = 256, 128, 8
#: Shares of results begin at multiples of so many elements, which kernels read from as fast as from the first.
_EVEN = 64
#: How many elements of each tensor are compared with what becomes of them, and in one step of how many later on.
LOOKED_AT, SELDOM = 4, 128


@dataclass
class _Step:
    """What a step does with its norms.

    Attributes:
        coded: the buckets whose results are not the exact mean.
        factor: what their results are handed back times; None if that is known at the end of the step only.
        measures: it measures the ratio.
        empties: it sends all that waits in residuals, uncompressed: a ratio of such a round says nothing of others.
    """

    number: int
    coded: frozenset[int] = frozenset()
    factor: float | None = 1.0
    measures: bool = False
    empties: bool = False
    spoilt: bool = False  # a coded value was not finite, on any rank
    sound: bool = True  # no value was
    norm: float = 0.0  # of the exact mean, where that is measured
    made: float = 0.0  # of what the code made, likewise
    refused: bool = False  # some rank has voted against all this
    names: set[str] = field(default_factory=set)  # whose results were decoded: sparse gradients are somebody else's
    turns: list[Turn] = field(default_factory=list)  # of coded buckets
    filled: set[str] = field(default_factory=set)  # that went through a coded round, whose residuals it may fill
    emptied: set[str] = field(default_factory=set)  # whose residuals an exact round has emptied


@dataclass(frozen=True)
class Given:
    """What results were handed back times, in one step.

    Attributes:
        names: of the parameters whose results were.
        sound: whether all values were finite.
        coded: parameters whose gradients were coded, also where results are the code's own.
    """

    step: int
    factor: float
    names: frozenset[str]
    sound: bool
    coded: frozenset[str]


@dataclass
class Excess:
    """Results that are far larger than usual, as after a gradient of a thousand times the usual size.

    Attributes:
        norm: of what was handed back, as a mean over ranks.
        times: as large as usual so many times.
        unused: the parameters of these results with which no optimizer has made a step.
        used: the norm of what others had left of them.
    """

    norm: float
    times: float
    unused: frozenset[str]
    used: float = 0.0


class Norms:
    """Measures the ratio of norms, and hands it to those who decode.

    Attributes:
        ratio: what is kept of it from step to step.
        given: what the last finished step has handed back.
        excess: what was far too large in that, until the next step begins.
        samples: a few elements of what was handed back, by parameter, in steps in which they are looked at.
    """

    def __init__(self, context: Context, buckets: Buckets) -> None:
        self._context, self._buckets = context, buckets
        self._by: dict[int, frozenset[str]] = {}  # by optimizer, what follows
        self._followed: frozenset[str] = frozenset()
        self._now = _Step(-1)
        self._counters: dict[tuple[int, int], Tensor] = {}  # of this rank, by bucket and position
        self._squares: dict[int, float] = {}  # of this rank's share of results, by bucket
        self._against = False
        self._wait: frozenset[str] = frozenset()  # what has a residual of coded rounds
        self._matched, self._looks = 0, False  # steps with coded results so far; whether this one's are looked at
        self.ratio = Ratio()
        self.given: Given | None = None
        self.excess: Excess | None = None
        self.samples: dict[str, Tensor] = {}

    def follow(self, names: Iterable[str], by: int = 0) -> None:
        """Match the norms of these parameters from the next step on: their optimizer takes the ratio out again.

        Args:
            by: tells one optimizer from another.
        """
        self._by[by] = frozenset(names)
        self._followed = frozenset().union(*self._by.values())

    # ---- training thread, between two steps ----

    def begin(self, step: int, *, exact: bool = False) -> None:
        """Choose what the coming step does, when it is known what each bucket exchanges; on every rank alike.

        Args:
            exact: it is an exact round of a second moment that is held, though some buckets may be coded as ever.
        """
        names = self._buckets.plan.names()
        frozen = {names[index] for index in self._buckets.frozen}
        matches = [] if self.ratio.off else [state for state in self._buckets if self._matches(state, step, frozen)]
        coded = frozenset(state.bucket.index for state in matches)
        self._counters, self._squares, self.samples, self.excess = {}, {}, {}, None
        self._matched += bool(coded)
        self._looks = self._matched & (self._matched - 1) == 0 or self._matched % SELDOM == 0
        if exact or not coded:
            self.ratio.refresh()
            self._now = _Step(step, coded, self.ratio.used())
            return
        rounds = [(state.bucket.index, state.round(step)) for state in matches]
        empties = all(round_.exact for _, round_ in rounds)
        if not any(round_.exact for _, round_ in rounds):  # one that empties some buckets is no other code
            code = repr([(bucket, round_.label) for bucket, round_ in rounds])
            self.ratio.usual.begin(zlib.crc32(code.encode()))
        self.ratio.keeps = any(round_.work.state for _, round_ in rounds)
        itself = not self.ratio.recent or empties or self.ratio.distance == 1
        self._now = _Step(step, coded, None if itself else self.ratio.used(), itself or self.ratio.due, empties)

    def _matches(self, state: BucketState, step: int, frozen: set[str]) -> bool:
        """Return whether a bucket's results differ from the mean, and all of them go to optimizers that know it.

        float16 has no room for another factor.
        """
        round_, names = state.round(step), {tensor.name for tensor in state.bucket.tensors}
        exact = round_.exact and not (round_.work.state and names & self._wait - frozen)
        return not exact and names <= self._followed and not names <= frozen and state.bucket.dtype != "float16"

    def vote_against(self) -> None:
        """Ask all ranks to hand back results as they are, for good: this program would not bear anything else."""
        self._against = True

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with what was saved, or anew with nothing."""
        self.ratio.load(state)
        self._wait, self._against = frozenset(state.get("wait", ())), False
        self.given = self.excess = None

    def take_excess(self) -> Excess | None:
        """Return :attr:`excess`, which is dealt with now."""
        found, self.excess = self.excess, None
        return found

    def state(self) -> dict[str, Any]:
        """Return what has to be saved; empty where nothing was coded."""
        found = self.ratio.state()
        return found | ({"wait": sorted(self._wait)} if self._wait else {})

    def settings(self) -> str:
        """Return what has to be equal on every rank before a step, in words."""
        return f"{sorted(self._followed)} {self.state()}"

    # ---- where gradients are offered ----

    def fold(self, turn: Turn, positions: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Fold gradients into counters, before anything is done to them."""
        if self._now.measures and turn.key.bucket in self._now.coded:
            with torch.no_grad():
                self._fold(turn, positions, grads)

    def _fold(self, turn: Turn, positions: Sequence[int], grads: Sequence[Tensor]) -> None:
        bucket = turn.state.bucket
        seen = [turn.state.seen(position, grad) for position, grad in zip(positions, grads, strict=True)]
        if self._context.options.nonfinite == "zero":
            seen = [flat.nan_to_num(0.0, 0.0, 0.0) for flat in seen]  # as they are exchanged
        number, offsets = self._number(), [bucket.offsets[position] for position in positions]
        rows = [*torch.empty(len(seen), number, dtype=torch.float64, device=seen[0].device)]
        ops.norm_sketch_all(seen, rows, turn.key.at(rank=0, purpose=NORM), counters=number, offsets=offsets)
        self._counters |= {(bucket.index, place): row for place, row in zip(positions, rows, strict=True)}

    def _number(self) -> int:
        return COUNTERS if self._context.world <= SMALL_JOB else FEW_COUNTERS

    # ---- exchange thread ----

    def note(self, turn: Turn, bad: NonFiniteCount) -> None:
        """Note how a bucket's exchange ended, which all ranks know alike."""
        coded = turn.key.bucket in self._now.coded
        if coded:
            self._now.turns.append(turn)
        if bad.count:
            self._now.sound = False
            self._now.spoilt = self._now.spoilt or coded
        elif not turn.round.exact:
            self._now.filled |= _names(turn.state)
        elif turn.round.work.state:
            self._now.emptied |= _names(turn.state)

    def exchange(self, await_decoded: Callable[[], None]) -> None:
        """After the last payload of a step, find both norms, if they are due.

        Args:
            await_decoded: returns when all results of the step are there.
        """
        now, context = self._now, self._context
        if not now.measures or now.spoilt:
            return
        await_decoded()
        deadline = context.deadline()
        against = torch.tensor([float(self._against)], dtype=torch.float64, device="cpu")
        counters = torch.cat([self._sum(deadline), against])
        squares = torch.tensor([math.fsum(self._squares.values())], dtype=torch.float64, device="cpu")
        mine = torch.cat([counters.to(torch.bfloat16).view(torch.uint8), squares.view(torch.uint8)])
        exchange = context.exchange(len(self._buckets), "norm", NonFiniteCount(), deadline)
        context.recorder.note(now.number, len(self._buckets), "norm")
        with context.metrics.timed("exchange", where=(now.number, None, "exchange of norms")):
            found, _ = everywhere.all_gather(exchange, mine)
        context.metrics.sent(exchange.bytes_sent, exact=False)
        self._add_up(found, len(counters))

    def _add_up(self, found: Sequence[Tensor], numbers: int) -> None:
        """Find the norms in what all ranks have sent: so many numbers in 16 bits, and a sum of squares."""
        now, total, squares = self._now, torch.zeros(numbers, dtype=torch.float64, device="cpu"), []
        for theirs in found:
            total += theirs[: 2 * numbers].view(torch.bfloat16)
            squares.append(theirs[2 * numbers :].clone().view(torch.float64).item())
        *counters, against = total.tolist()
        now.refused = against > 0
        now.norm = math.sqrt(math.fsum(value * value for value in counters)) / self._context.world
        now.made = math.sqrt(math.fsum(squares)) / (now.factor or 1.0)

    def _sum(self, deadline: Deadline) -> Tensor:
        """Return the counters of this rank: those of tensors are added in the plan's order, whatever came first."""
        total = torch.zeros(self._number(), dtype=torch.float64, device="cpu")
        places: dict[torch.device, tuple[Device, list[Tensor]]] = {}
        for place, counters in sorted(self._counters.items(), key=lambda item: item[0]):
            places.setdefault(counters.device, (self._buckets[place[0]].device, []))[1].append(counters)
        for device, of_tensors in places.values():
            for row in _fetched(device, torch.stack(of_tensors).view(-1), deadline).view(len(of_tensors), -1):
                total += row
        return total

    def factor(self, bucket: int) -> float:
        """Return what a bucket's results are decoded times."""
        return (self._now.factor or 1.0) if bucket in self._now.coded else 1.0

    @property
    def holds_results(self) -> bool:
        """Whether no result of the step is handed over before the last one."""
        return self._now.factor is None

    def decoded(self, turn: Turn) -> None:
        """Look at a bucket's results, where the step measures."""
        now, state = self._now, turn.state
        if now.spoilt or state.bucket.index not in now.coded:
            return
        now.names |= _names(state)
        if self._looks and not self.holds_results:
            self._sample(state)
        rank, world = self._context.rank, self._context.world
        shares = [own_share(grad, rank, world) for grad in state.grads if grad is not None] if now.measures else []
        shares = [share for share in shares if share.numel()]
        if not shares:
            return
        sums = state.device.zeros(len(shares), torch.float64)
        ops.norm_offer_all(shares, list(sums.split(1)), [share.numel() for share in shares], power=2)
        sums = _fetched(state.device, sums, self._context.deadline())
        self._squares[state.bucket.index] = math.fsum(sums.tolist()) / turn.result_scale**2

    def _sample(self, state: BucketState) -> None:
        named = zip(state.bucket.tensors, state.grads, strict=True)
        self.samples |= {t.name: some(grad) for t, grad in named if grad is not None and grad.numel()}

    def settle(self) -> None:
        """At the end of a step, take what was measured, scale results that were held, and note what was handed back."""
        now = self._now
        if now.coded:
            self.ratio.age_by_a_step()
        self.ratio.off = self.ratio.off or now.refused
        known = now.measures and not now.spoilt and 0 < now.made < math.inf and 0 < now.norm < math.inf
        known = known and 1 / BEYOND < now.norm / now.made < BEYOND
        if known:
            self.ratio.take(now.norm, now.made, empties=now.empties)
        if now.factor is None:
            counts = known and not now.refused
            now.factor = self.ratio.counted(now.norm, now.made, empties=now.empties) if counts else 1.0
            for turn in now.turns:  # whose results were held
                for grad in turn.state.grads if now.factor != 1.0 else ():
                    if grad is not None:
                        grad.mul_(now.factor)
                turn.write_back()
                if self._looks:
                    self._sample(turn.state)
        if self._followed:
            self._wait = (self._wait - now.emptied) | now.filled
        if known and self.ratio.usual.large and not now.empties:
            self.excess = Excess(now.made * now.factor, now.made / self.ratio.usual.made, frozenset(now.names))
        self.given = Given(now.number, now.factor, frozenset(now.names), now.sound, frozenset(now.filled))


def _names(state: BucketState) -> set[str]:
    """Return whose gradients a bucket has."""
    return {tensor.name for tensor, grad in zip(state.bucket.tensors, state.grads, strict=True) if grad is not None}


def own_share(result: Tensor, rank: int, world: int) -> Tensor:
    """Return a rank's share of what all ranks have alike, flat."""
    number = result.numel()
    first = number * rank // world // _EVEN * _EVEN
    end = number if rank + 1 == world else number * (rank + 1) // world // _EVEN * _EVEN
    return result.view(-1)[first:end]


def some(grad: Tensor) -> Tensor:
    """Return a few elements of a gradient, spread over it."""
    flat = grad.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // LOOKED_AT)][:LOOKED_AT].clone()


def _fetched(device: Device, values: Tensor, deadline: Deadline) -> Tensor:
    """Return a few numbers in host memory."""
    if not device.is_accelerator:
        return values
    host = device.host_zeros(values.numel(), values.dtype)
    device.copy(host, values)
    device.wait(device.record_event(), deadline)
    return host
