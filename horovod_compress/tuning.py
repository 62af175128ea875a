"""Adaptive schedules in a running job: buckets are tried, measured, and chosen on rank 0 for all.

At the first gradient of a step, when nothing is under way, the ranks show each other what the last few steps took.
Rank 0 asks the schedule for the next buckets and tells the others. In between nothing is exchanged but gradients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError
from .plan import Bucket, Plan, TensorSpec
from .reducer import Reducer
from .schedule import ADAPTIVE
from .schedule.trial import BucketCost, Groups, Measured, Tuning
from .watch import Watch

#: Steps of a trial: the first one, which pays for new buffers, and those that are measured.
TRIAL_STEPS = 3

#: Shows a value to all ranks and returns every rank's, in rank order.
Share = Callable[[Any], list[Any]]

_log = logging.getLogger("horovod_compress")


@dataclass(frozen=True)
class _Decision:
    """What rank 0 tells the others: buckets to try or to keep, or why it cannot."""

    plan: list[dict] | None
    done: bool
    problem: str | None = None


class Tuner:
    """Tries buckets until a schedule has chosen.

    Args:
        schedule: ``"mergecomp"``, ``"mergecomp:N"`` or ``"layerfusion"``.
        share: joins all ranks; must not wait for ever.
        first: the step to begin at, when warm-up is over.
        check_bucket: refuses buckets that the method cannot take.
    """

    def __init__(
        self,
        reducer: Reducer,
        schedule: str,
        share: Share,
        first: int = 0,
        check_bucket: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self._reducer, self._schedule, self._share = reducer, schedule, share
        self._tuning: Tuning | None = None
        self._tensors: list[TensorSpec] = []  # in the order of arrival on rank 0
        self._step, self._began, self._cpu = -1, reducer.step, 0.0
        self._first, self._check_bucket = first, check_bucket
        numbers = {bucket.method for bucket in reducer.plan.buckets if bucket.compressed}
        self._method = max(numbers, default=0)  # there is one
        self._idle = reducer.world == 1 or not numbers
        self.done = self._idle
        self._watch_on()

    def _watch_on(self) -> None:
        self._reducer.watch = None if self.done else Watch(self._reducer.plan)

    def begin_step(self) -> bool:
        """Take note of a step's first gradient, before it is offered; return whether buckets were changed."""
        step, watch = self._reducer.next_step(), self._reducer.watch
        if self.done or watch is None or step == self._step or step < self._first:
            return False
        self._step = step
        if watch.steps() < TRIAL_STEPS:
            watch.begin()
            return False
        watch.begin()  # ends the step before
        self._decide(watch)
        return True

    def resume(self, plan: Plan, done: bool) -> None:
        """Go on with the buckets of a checkpoint.

        Args:
            done: they were chosen, not only tried.
        """
        self._reducer.replan(plan)
        self.done = self._idle or done
        self._tuning, self._step = None, -1
        self._watch_on()

    def _decide(self, watch: Watch) -> None:
        began = time.process_time()
        of_ranks = self._share(watch.buckets())
        decision = self._next(watch, of_ranks) if self._reducer.rank == 0 else None
        told: _Decision = self._share(decision)[0]
        if told.problem:
            raise ConfigError(f"rank 0 could not choose buckets: {told.problem}")
        if told.plan is not None:
            self._reducer.replan(Plan.from_document(told.plan))
        self.done = told.done
        self._watch_on()
        if self._reducer.watch:
            self._reducer.watch.begin()
        self._cpu += time.process_time() - began
        if self.done:
            self._tell()

    def _tell(self) -> None:
        plan = self._reducer.plan
        sizes = ", ".join(str(len(bucket.tensors)) for bucket in plan.buckets[:12])
        _log.info(
            "schedule %s chose %d bucket(s) in %d steps and %.2f s of processor time; tensors in each: %s",
            self._schedule, len(plan.buckets), self._step - self._began, self._cpu, sizes,
        )  # fmt: skip

    # ---- rank 0 ----

    def _next(self, watch: Watch, of_ranks: Sequence[Sequence[BucketCost]]) -> _Decision:
        try:
            groups, done = self._advance(watch, of_ranks)
            return _Decision(self._plan(groups).document(), done)
        except Exception as error:  # told to every rank, which raises it
            return _Decision(None, True, f"{type(error).__name__}: {error}")

    def _advance(self, watch: Watch, of_ranks: Sequence[Sequence[BucketCost]]) -> tuple[Groups, bool]:
        if self._tuning is None:
            return self._start(watch), False
        measured = Measured(watch.step_seconds(), watch.arrivals(self._tensors), least(of_ranks))
        try:
            return self._tuning.send(measured), False
        except StopIteration as end:
            return end.value, True

    def _start(self, watch: Watch) -> Groups:
        """Begin with the order in which gradients came in the first steps."""
        plan = self._reducer.plan
        tensors = [tensor for bucket in plan.buckets for tensor in bucket.tensors]
        compressed = {tensor.name for bucket in plan.buckets if bucket.compressed for tensor in bucket.tensors}
        self._tensors = [tensors[index] for index in watch.order() if tensors[index].name in compressed]
        name, _, argument = self._schedule.partition(":")
        self._tuning = ADAPTIVE[name].tune(len(self._tensors), argument)
        return next(self._tuning)

    def _plan(self, groups: Groups) -> Plan:
        """Return the plan of some groups, with the uncompressed buckets behind them as they are."""
        cut, first = [], 0
        for number in groups:
            cut.append((self._tensors[first : first + number], self._method))
            first += number
        plain = [(bucket.tensors, 0) for bucket in self._reducer.plan.buckets if not bucket.compressed]
        found = Plan.of([*cut, *plain])
        for bucket in found.buckets:
            self._check_bucket(bucket)
        return found


def least(of_ranks: Sequence[Sequence[BucketCost]]) -> list[BucketCost]:
    """Return each bucket's costs on the rank that waited for nobody, and the slowest decoding."""
    return [
        BucketCost(every[0].elements, min(one.exchange for one in every), max(one.decode for one in every))
        for every in zip(*of_ranks)
    ]
