"""Chooses buckets in a running job: an adaptive schedule tries some, and watches whether the network changes.

Buckets are tried, measured, and chosen on rank 0 for all. At the first gradient of a step, when nothing is under way,
the ranks show each other what the last few steps took. Rank 0 asks the schedule for the next buckets and tells the
others. In between nothing is exchanged but gradients.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from statistics import mean
from typing import Any

from ..errors import ConfigError
from ..observe.metrics import Metrics
from ..schedule.by_name import ADAPTIVE, OPTIONAL
from ..schedule.plan import Plan, TensorSpec
from ..schedule.trial import BucketCost, Choice, Grouped, Measured, SearchSpace, Tuning, Watch, as_buckets
from .methods import Methods
from .reducer import Reducer

# ---- when to choose again ------------------------------------------------------------------------

#: Steps between two looks; each costs one small gather.
EVERY = 100
#: A change by this factor, up or down, counts.
RATIO = 1.5
#: This many checks in a row have to show it.
LOOKS = 2


class RetuneTrigger:
    """Notices that the network is no longer what it was when buckets were chosen, by the time of exchanges.

    Args:
        step: the first step of the buckets in use.
    """

    def __init__(self, metrics: Metrics, step: int) -> None:
        self._metrics = metrics
        self._step, self._seconds = step, metrics.seconds["exchange"]
        self._seen = 0
        #: Seconds of exchange in a step, at first and at the last look.
        self.first: float | None = None
        self.last = 0.0

    def due(self, step: int) -> bool:
        """Return whether it is time to look; the same on every rank."""
        return step - self._step >= EVERY

    def seconds(self, step: int) -> float:
        """Return this rank's seconds of exchange in a step, since the last look."""
        steps, self._step = step - self._step, step
        spent, self._seconds = self._metrics.seconds["exchange"] - self._seconds, self._metrics.seconds["exchange"]
        return spent / steps

    def look(self, of_ranks: Sequence[float]) -> bool:
        """Take in every rank's seconds, and return whether things have changed; the same on every rank."""
        self.last = min(of_ranks)  # of the rank that did not wait
        if self.first is None:
            self.first = self.last
        changed = not self.first / RATIO <= self.last <= self.first * RATIO
        self._seen = self._seen + 1 if changed else 0
        return self._seen >= LOOKS


# ---- trials --------------------------------------------------------------------------------------

#: Steps of a trial: the first one, which pays for new buffers, and those that are measured.
TRIAL_STEPS = 3
#: Below this many elements, there is little to gain from schedule="auto".
LEAST_ELEMENTS = 1 << 18

#: Shows plain data to all ranks and returns every rank's, in rank order. Of several compressions, ranks may begin steps
#: in another order: None where some rank has come for another one.
Share = Callable[[Any], list[Any] | None]
#: Of every rank: the seconds of the steps of a trial that count, and what each bucket costs.
StepSeconds = Sequence[Sequence[float]]
BucketCosts = Sequence[Mapping[int, BucketCost]]

_log = logging.getLogger("horovod_compress")


@dataclass(frozen=True)
class _Decision:
    """What rank 0 tells the others: buckets to try or to keep, or why it cannot."""

    plan: list[dict[str, Any]] | None
    done: bool
    why: str = ""
    problem: str | None = None


class Tuner:
    """Tries buckets until a schedule has chosen.

    Args:
        schedule: an adaptive one, such as ``"auto"`` or ``"mergecomp:3"``.
        share: joins all ranks; must not wait forever. Where it returns nothing, that is for a later step.
        methods: of the reducer's plan.
        first: the step to begin at, when warm-up is over.
    """

    def __init__(self, reducer: Reducer, schedule: str, share: Share, methods: Methods, first: int = 0) -> None:
        self._reducer, self._schedule, self._share, self._methods = reducer, schedule, share, methods
        self._first = first
        self._tuning: Tuning | None = None
        self._before = reducer.plan  # what a search that fails goes back to
        self._tensors: list[TensorSpec] = []  # in the order of arrival on rank 0
        self._tried: Grouped | None = None  # rank 0's choice
        self._step, self._began, self._cpu = -1, reducer.step, 0.0
        compressed = any(bucket.compressed for bucket in reducer.plan.buckets)
        # There is nothing to choose, or no way to.
        aside = reducer.plan.count < LEAST_ELEMENTS or bool(reducer.buckets.tables_that_stay())
        self._fixed = not compressed or (schedule == OPTIONAL and aside)
        self.done = self._idle
        self._trigger: RetuneTrigger | None = None
        self._reducer.watch = None

    @property
    def _idle(self) -> bool:
        return self._fixed or self._reducer.world == 1

    @property
    def chosen(self) -> bool:
        """Whether buckets were chosen, and not only left as they were."""
        return self.done and not self._idle

    def _watch_anew(self) -> None:
        """Watch from the step on that begins now, unless the search is over."""
        self._reducer.watch = watch = None if self.done else Watch(self._reducer.plan)
        if watch:
            watch.begin()

    def begin_step(self) -> bool:
        """Take note of a step's first gradient, before it is offered; return whether buckets were changed."""
        step = self._reducer.next_step()
        if self._idle or step == self._step or step < self._first:
            return False
        self._step = step
        if self.done:
            self._look(step)
            return False
        if self._reducer.watch is None:  # a search begins
            self._before, self._began, self._cpu = self._reducer.plan, step, 0.0
            self._reducer.watch = Watch(self._reducer.plan)
        watch = self._reducer.watch
        enough = watch.steps() >= TRIAL_STEPS
        watch.begin()  # ends the step before
        return enough and self._decide(watch)

    def check(self, plan: Plan) -> Plan:
        """Refuse the buckets of a checkpoint that :meth:`resume` could not go on with; return those it would take.

        Raises:
            ConfigError: says what they should be.
        """
        if self._fixed:
            return self._reducer.plan
        for bucket in plan.buckets:
            self._methods.check_bucket(bucket, self._reducer.world)
        if self._schedule == OPTIONAL and not self._is_of_these_devices(plan):
            return self._reducer.plan
        self._reducer.check_replan(plan)
        return plan

    def resume(self, plan: Plan, done: bool) -> None:
        """Go on with the buckets of a checkpoint, which :meth:`check` has found good.

        Args:
            done: they were chosen, not only tried.
        """
        if self._fixed:
            return
        fits = self._schedule != OPTIONAL or self._is_of_these_devices(plan)
        if fits:
            self._reducer.replan(plan)
        self.done = self._idle or (done and fits)
        self._tuning, self._step, self._trigger = None, -1, None
        self._reducer.watch = None

    def _is_of_these_devices(self, plan: Plan) -> bool:
        """Return whether no bucket would hold tensors that are on several devices now."""
        try:
            plan.placed(tensor for bucket in self._reducer.plan.buckets for tensor in bucket.tensors)
        except ConfigError:
            return False
        return True

    def wait_for(self, step: int) -> None:
        """Begin no earlier than at this step."""
        self._first = max(self._first, step)

    def stop(self) -> None:
        """Leave the buckets as they are from now on."""
        self._fixed = self.done = True
        self._reducer.watch = None

    def _look(self, step: int) -> None:
        """Choose again if the network has changed; the ranks come to the same end."""
        if self._schedule != OPTIONAL:
            return
        if self._trigger is None:
            self._trigger = RetuneTrigger(self._reducer.metrics, step)
        if not self._trigger.due(step):
            return
        shown = self._share(self._trigger.seconds(step))
        if shown is not None and self._trigger.look(shown):
            if self._reducer.rank == 0:
                _log.warning(
                    "the exchanges of a step take %.1f ms, not %.1f ms as when buckets were chosen: the network or "
                    "the method's rounds have changed; choosing again",
                    1e3 * self._trigger.last, 1e3 * (self._trigger.first or 0.0),
                )  # fmt: skip
            self.done, self._tuning, self._trigger = False, None, None
            self._reducer.watch = None

    def _decide(self, watch: Watch) -> bool:
        """Choose what comes next; return whether all ranks have come for that."""
        began = time.thread_time()
        shown = self._share([watch.step_seconds(), plain_costs(watch.buckets())])
        if shown is None:  # again after as many steps: else ranks would meet in each, and what is watched would grow
            self._watch_anew()
            return False
        steps, costs = ([one[part] for one in shown] for part in (0, 1))
        decision = asdict(self._next(watch, steps, list(map(costs_of, costs)))) if self._reducer.rank == 0 else None
        decisions = self._share(decision)
        if decisions is None:
            self._tuning, self._step, self._reducer.watch = None, -1, None
            raise ConfigError(
                f"rank {self._reducer.rank}: ranks met for another compression while they chose the buckets of this "
                "one; begin the steps of all compressions in the same thread"
            )
        told = _Decision(**decisions[0])
        if told.problem and self._schedule == OPTIONAL:
            if self._reducer.rank == 0:
                _log.warning("schedule auto returns to its initial buckets: %s", told.problem)
            self._reducer.replan(self._before)  # the last trial's may be the slowest of all
            self.stop()
            return True
        if told.problem:
            raise ConfigError(f"rank 0 could not choose buckets: {told.problem}")
        if told.plan is not None:
            self._try(Plan.from_document(told.plan))
        self.done = told.done
        self._watch_anew()
        self._cpu += time.thread_time() - began
        if self.done and self._reducer.rank == 0:
            plan = self._reducer.plan
            _log.info(
                "schedule %s chose %d bucket(s) in %d steps and %.2f s of processor time; tensors in each: %s%s",
                self._schedule, len(plan.buckets), self._step - self._began, self._cpu, _sizes(plan),
                f". {told.why}" if told.why else "",
            )  # fmt: skip
        return True

    def _try(self, plan: Plan) -> None:
        try:
            self._reducer.replan(plan)
        except BaseException:  # no memory: the times of the next steps are those of the buckets of before
            self._tuning, self._step, self._reducer.watch = None, -1, None
            raise

    # ---- rank 0 ----

    def _next(self, watch: Watch, steps: StepSeconds, costs: BucketCosts) -> _Decision:
        """Return what comes next, by the seconds of the steps that count and what each bucket costs, on every rank."""
        try:
            choice, done = self._advance(watch, steps, costs)
            self._tried = self._as_buckets(choice)
            return _Decision(self._tried.plan.document(), done, choice.why)
        except Exception as error:  # noqa: BLE001  told to every rank, which raises it
            return _Decision(None, True, problem=f"{type(error).__name__}: {error}")

    def _advance(self, watch: Watch, steps: StepSeconds, costs: BucketCosts) -> tuple[Choice, bool]:
        if self._tuning is None:
            return self._start(watch), False
        assert self._tried is not None
        of_buckets = self._tried.costs(costs_over_ranks(costs))
        measured = Measured(step_over_ranks(steps), watch.arrivals(self._tensors), of_buckets)
        _log.debug(
            "schedule %s tried %d bucket(s): %.1f ms from first gradient to last result; tensors in each: %s",
            self._schedule, len(self._reducer.plan.buckets), 1e3 * measured.step, _sizes(self._reducer.plan),
        )  # fmt: skip
        try:
            return self._tuning.send(measured), False
        except StopIteration as end:
            return end.value, True

    def _start(self, watch: Watch) -> Choice:
        """Begin with the order in which gradients came in the first steps."""
        plan = self._reducer.plan
        tensors = [(tensor, bucket) for bucket in plan.buckets for tensor in bucket.tensors]
        arrived = [tensors[index] for index in watch.order()]
        self._tensors = [tensor for tensor, bucket in arrived if bucket.compressed]
        methods = {bucket.method for bucket in plan.buckets if bucket.compressed}
        reducing = {method for method in methods if not self._methods.is_plain(method)}
        may_be_plain = bool(reducing) and all(map(self._methods.may_be_plain, reducing))
        name, _, argument = self._schedule.partition(":")
        self._tuning = ADAPTIVE[name].tune(SearchSpace(len(self._tensors), argument, may_be_plain))
        return next(self._tuning)

    def _as_buckets(self, choice: Choice) -> Grouped:
        """Return the buckets of a choice, with those of small tensors after them as they are."""
        buckets = self._reducer.plan.buckets
        methods = {tensor.name: bucket.method for bucket in buckets for tensor in bucket.tensors}
        small = [bucket.tensors for bucket in buckets if not bucket.compressed]
        found = as_buckets(choice, self._tensors, methods.__getitem__, self._methods.may_be_plain, small)
        self._reducer.check_replan(found.plan)
        for bucket in found.plan.buckets:
            self._methods.check_bucket(bucket, self._reducer.world)
        return found


def _sizes(plan: Plan) -> str:
    """Return how many tensors each bucket holds, for people."""
    sizes = [f"{len(bucket.tensors)}{' uncompressed' if bucket.plain else ''}" for bucket in plan.buckets[:12]]
    return ", ".join([*sizes, "..."] if len(plan.buckets) > 12 else sizes)


def plain_costs(costs: Mapping[int, BucketCost]) -> list[list[Any]]:
    """Return what each bucket costs as plain data."""
    return [[bucket, *astuple(cost)] for bucket, cost in costs.items()]


def costs_of(plain: Sequence[Sequence[Any]]) -> dict[int, BucketCost]:
    """Rebuild costs from :func:`plain_costs`."""
    return {bucket: BucketCost(*cost) for bucket, *cost in plain}


def step_over_ranks(of_ranks: StepSeconds) -> float:
    """Return the seconds of a step: the mean over ranks, and of several steps the shortest.

    Where ranks share processors, the mean differs least from step to step: one rank's gain is another one's loss. A
    rank that comes late adds its lateness to the others' seconds, in the step that it happens in.
    """
    return min(mean(seconds) for seconds in zip(*of_ranks, strict=True))


def costs_over_ranks(of_ranks: BucketCosts) -> dict[int, BucketCost]:
    """Return each bucket's costs on the rank that did not wait, and the slowest decoding."""
    found = {}
    for bucket, one in of_ranks[0].items():
        exchange = min(costs[bucket].exchange for costs in of_ranks)
        decode = max(costs[bucket].decode for costs in of_ranks)
        found[bucket] = BucketCost(one.elements, exchange, decode, one.plain)
    return found
