"""What is handed back has the norm of the exact mean gradient, so that clipping sees a gradient of the right size.

What comes out of a code is larger or smaller than the mean of the gradients: it carries errors whose sum is held back.
So coded results are handed back times a ratio, and a hook before the optimizer's step takes it out again
(:mod:`.optimizer.matching`):

    ratio = norm of the exact mean / norm of what the code makes      one for all coded parameters

It is measured now and then and held in between. In a step that measures, every rank folds its gradients into a few
counters with random signs, a count sketch of one row (Charikar, Chen, Farach-Colton 2002). Sketches add up over ranks,
and the norm of their sum is that of the mean within 1 / sqrt(2 counters). They travel after the step's last payload, in
16 bits, as every rank sends them to every other; all add them in rank order, so all come to the same ratio. It counts
from the next step on. Where none is known yet, and in rounds that empty residuals, results are held until it is.

A gradient's way meets this in five places: ``begin`` (training thread), ``fold`` (where gradients are offered),
``exchange`` (exchange thread), ``factor`` and ``decoded``, ``settle`` (decoding thread).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..codecs.dense import Dense
from ..codecs.work import work_dtype
from ..exchange import gather
from ..exchange.deadline import Deadline
from ..exchange.device import Device
from ..exchange.wire import NonFiniteCount
from ..ops.keys import NORM
from .bucket.state import BucketState
from .buckets import Buckets
from .context import Context

#: The ratio is measured in one coded step of this many.
EVERY = 5
#: Ratios this near to 1 count as 1: such results are handed back as they are, to the bit.
NEAR = math.log(1.125)
#: Counters, and those of a job with more ranks than :data:`SMALL_JOB`: every rank sends them to every other.
COUNTERS, FEW_COUNTERS, SMALL_JOB = 272, 112, 8
#: How many elements of each tensor are compared with what becomes of them, and in one step of how many, in the long run.
LOOKED_AT, SELDOM = 4, 128
#: A norm or a ratio that has changed by this much makes what exact rounds have found out of date.
FAR = 3.0


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
    spoilt: bool = False  # a value was not finite, on any rank
    norm: float = 0.0  # of the exact mean, where that is measured

    @property
    def late(self) -> bool:
        """Whether results are held until the end of the step."""
        return self.factor is None


@dataclass(frozen=True)
class Given:
    """What results were handed back times, in one step.

    Attributes:
        names: of the parameters whose results were.
        sound: whether all values were finite.
    """

    step: int
    factor: float
    names: frozenset[str]
    sound: bool


class Norms:
    """Measures the ratio of norms, and hands it to those who decode.

    Attributes:
        ratio: as measured last; None before that.
        norm: of the mean gradient, as measured last.
        stale: what exact rounds have found is out of date: norms or ratios have run away since.
        given: what the last finished step has handed back.
    """

    def __init__(self, context: Context, buckets: Buckets) -> None:
        self._context, self._buckets = context, buckets
        self._followed: frozenset[str] = frozenset()
        self._now = _Step(-1)
        self._tables: dict[tuple[int, int], Tensor] = {}  # of this rank, by bucket and position
        self._squares: dict[int, float] = {}  # of results, by bucket
        self._coded_steps = 0  # since the ratio was measured
        self._since: tuple[float, float] | None = None  # the first norm and ratio after the last exact round
        self._against = self._off = False
        self._matched, self._looks = 0, False  # steps with coded results so far; whether this one's are looked at
        self.ratio: float | None = None
        self.norm = 0.0
        self.stale = False
        self.given: Given | None = None
        #: A few elements of what it has handed back, by parameter, in steps in which these are looked at.
        self.samples: dict[str, Tensor] = {}

    def follow(self, names: Iterable[str]) -> None:
        """Match the norms of these parameters from the next step on: their optimizer takes the ratio out again."""
        self._followed |= frozenset(names)

    @property
    def columns(self) -> int:
        """The number of counters."""
        return ops.sketch_columns(COUNTERS if self._context.world <= SMALL_JOB else FEW_COUNTERS)

    # ---- training thread, between two steps ----

    def begin(self, step: int) -> None:
        """Choose what the coming step does, when it is known what each bucket exchanges; on every rank alike."""
        coded = frozenset() if self._off else frozenset(s.bucket.index for s in self._buckets if self._matches(s, step))
        self._tables, self._squares, self.samples = {}, {}, {}
        self._matched += bool(coded)
        self._looks = self._matched & (self._matched - 1) == 0 or self._matched % SELDOM == 0
        if not coded:
            self._since, self.stale = None, False  # an exact round, for one
            self._now = _Step(step)
            return
        empties = all(isinstance(self._buckets[index].round(step).codec, Dense) for index in coded)
        late = self.ratio is None or empties
        measures = late or self._coded_steps >= EVERY - 1
        self._now = _Step(step, coded, None if late else _used(self.ratio), measures, empties)

    def _matches(self, state: BucketState, step: int) -> bool:
        """Return whether a bucket's results differ from the mean, and all of them go to optimizers that know it."""
        round_ = state.round(step)
        exact = isinstance(round_.codec, Dense) and not round_.work.state
        return not exact and all(tensor.name in self._followed for tensor in state.bucket.tensors)

    def vote_against(self) -> None:
        """Ask all ranks to hand back results as they are, for good: this program would not bear anything else."""
        self._against = True

    @property
    def off(self) -> bool:
        """Whether the ranks have agreed to hand back results as they are."""
        return self._off

    # ---- where gradients are offered ----

    def fold(self, state: BucketState, position: int, grad: Tensor, step: int) -> None:
        """Fold a gradient into the counters, before anything is done to it."""
        bucket = state.bucket
        if not self._now.measures or bucket.index not in self._now.coded:
            return
        table = torch.zeros(self.columns, dtype=work_dtype(bucket), device=grad.device)
        key = self._context.key(step, bucket.index).at(rank=0, purpose=NORM)
        ops.sketch_encode(grad.contiguous().view(-1), None, table, 1, key, offset=bucket.offsets[position])
        self._tables[bucket.index, position] = table

    # ---- exchange thread ----

    def note(self, state: BucketState, bad: NonFiniteCount) -> None:
        """Note how a bucket's exchange ended, which all ranks know alike."""
        if (bad.count or bad.zeroed) and state.bucket.index in self._now.coded:
            self._now.spoilt = True

    def exchange(self) -> None:
        """After the last payload of a step, find the norm of the exact mean, if it is due."""
        now, context = self._now, self._context
        if not now.measures or now.spoilt:
            return
        deadline = Deadline(context.options.timeout)
        mine = torch.cat([self._sum(deadline), torch.tensor([float(self._against)], dtype=torch.float64)])
        exchange = context.exchange(len(self._buckets), "norm", NonFiniteCount(), deadline)
        with context.metrics.timed("exchange", where=(now.number,)):
            found, _ = gather.run(exchange, mine.to(torch.bfloat16).view(torch.uint8))
        context.metrics.bytes_sent += exchange.bytes_sent
        total = torch.zeros(len(mine), dtype=torch.float64)
        for theirs in found:
            total += theirs.view(torch.bfloat16)
        *counters, against = total.tolist()
        self._off = against > 0
        now.norm = math.sqrt(math.fsum(value * value for value in counters)) / context.world

    def _sum(self, deadline: Deadline) -> Tensor:
        """Return the counters of this rank: tables are added in the order of the plan, whatever came first."""
        total = torch.zeros(self.columns, dtype=torch.float64)
        for place in sorted(self._tables):
            total += _fetched(self._buckets[place[0]].device, self._tables[place], deadline)
        return total

    # ---- decoding thread ----

    def factor(self, state: BucketState) -> float:
        """Return what a bucket's results are decoded times."""
        return (self._now.factor or 1.0) if state.bucket.index in self._now.coded else 1.0

    @property
    def holds_results(self) -> bool:
        """Whether no result of the step is handed over before the last one."""
        return self._now.late

    def decoded(self, state: BucketState) -> None:
        """Look at a bucket's results, where the step measures."""
        now = self._now
        if now.spoilt or state.bucket.index not in now.coded:
            return
        if self._looks and not now.late:
            self._sample(state)
        if not now.measures:
            return
        grads = [grad for grad in state.memory.grads if grad is not None and grad.numel()]
        sums = state.device.zeros(len(grads), torch.float64)
        ops.norm_offer_all(grads, list(sums.split(1)), [grad.numel() for grad in grads], power=2)
        sums = _fetched(state.device, sums, Deadline(self._context.options.timeout))
        self._squares[state.bucket.index] = math.fsum(sums.tolist())

    def _sample(self, state: BucketState) -> None:
        for tensor, grad in zip(state.bucket.tensors, state.memory.grads, strict=True):
            if grad is not None and grad.numel():
                self.samples[tensor.name] = some(grad)

    def settle(self) -> None:
        """At the end of a step, take what was measured; scale results that were held."""
        now = self._now
        raw = math.sqrt(math.fsum(self._squares.values())) / (now.factor or 1.0)
        self._coded_steps += bool(now.coded)
        if now.measures and not now.spoilt and 0 < raw < math.inf and 0 < now.norm < math.inf:
            self.norm, ratio = now.norm, now.norm / raw
            self._coded_steps = EVERY if now.empties else 0  # another residual has another ratio: measured at once
            if not now.empties:
                self._take(ratio)
            if now.late:
                self._scale_held(1.0 if self._off else _used(ratio))
        if now.late:
            now.factor = now.factor or 1.0
        if now.coded:
            names = frozenset(tensor.name for index in now.coded for tensor in self._buckets[index].bucket.tensors)
            self.given = Given(now.number, now.factor or 1.0, names, not now.spoilt)
        else:
            self.given = Given(now.number, 1.0, frozenset(), not now.spoilt)

    def _take(self, ratio: float) -> None:
        self.ratio = ratio
        if self._since is None:
            self._since = self.norm, ratio
        first_norm, first_ratio = self._since
        self.stale = self.norm > FAR * first_norm or not 1 / FAR < ratio / first_ratio < FAR

    def _scale_held(self, factor: float) -> None:
        """Multiply the results that were held."""
        self._now.factor = factor
        if factor == 1.0:
            return
        for index in self._now.coded:
            state = self._buckets[index]
            for grad in state.memory.grads:
                if grad is not None:
                    grad.mul_(factor)
            state.write_back()
            if self._looks:
                self._sample(state)

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """Return what has to be saved, equal on every rank; empty where nothing was measured."""
        if self.ratio is None and not self._off:
            return {}
        since = list(self._since or ())
        return {"ratio": self.ratio or 0.0, "norm": self.norm, "steps": self._coded_steps, "since": since} | (
            {"stale": self.stale, "off": self._off}
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state` returned; of nothing, begin anew."""
        self.ratio, self.norm = state.get("ratio") or None, float(state.get("norm", 0.0))
        self._coded_steps, since = int(state.get("steps", 0)), state.get("since")
        self._since = (float(since[0]), float(since[1])) if since else None
        self.stale, self._off = bool(state.get("stale")), bool(state.get("off"))
        self.given = None

    def settings(self) -> str:
        """Return what has to be equal on every rank before a step, in words."""
        return f"{sorted(self._followed)} {self.state()}"


def _fetched(device: Device, values: Tensor, deadline: Deadline) -> Tensor:
    """Return a few numbers in host memory."""
    if not device.is_accelerator:
        return values
    host = device.host_zeros(values.numel(), values.dtype)
    device.copy(host, values)
    device.wait(device.record_event(), deadline)
    return host


def some(grad: Tensor) -> Tensor:
    """Return a few elements of a gradient, spread over it."""
    flat = grad.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // LOOKED_AT)][:LOOKED_AT].clone()


def _used(ratio: float | None) -> float:
    """Return what results are handed back times, given the ratio."""
    return 1.0 if ratio is None or abs(math.log(ratio)) < NEAR else ratio


def check_state(state: object) -> bool:
    """Return whether a saved state has the form of what :meth:`Norms.state` returns."""
    if not isinstance(state, Mapping) or not set(state) <= {"ratio", "norm", "steps", "since", "stale", "off"}:
        return False
    numbers = [state.get("ratio", 0.0), state.get("norm", 0.0), state.get("steps", 0)]
    since = state.get("since", [])
    if not isinstance(since, (list, tuple)) or len(since) not in (0, 2):
        return False
    fits = all(type(number) in (int, float) and 0 <= number < math.inf for number in [*numbers, *since])
    return fits and all(type(state.get(name, False)) is bool for name in ("stale", "off"))
