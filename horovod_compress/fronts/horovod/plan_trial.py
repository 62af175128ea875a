"""Steps of a stand-in model in a real job, beside what was predicted of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import horovod.torch as hvd
import torch

from ...codecs.base import Codec
from ...engine.job import Gathering
from ...engine.tuning import costs_of, costs_over_ranks, plain_costs
from ...errors import ConfigError
from ...planner import comparison
from ...planner.comparison import Trial
from ...planner.predictions import Case, predicted
from ...planner.synthetic import TILE, Gradients, Pace, SyntheticModel, calibrate, untouched_memory
from ...schedule.plan import Plan
from ...schedule.trial import Watch
from .compression import Compression
from .job import HorovodJob

_WARM_UP = 2
_TIMEOUT_SECONDS = 600.0  # a slow link is no failure here


@dataclass(frozen=True)
class _Asked:
    """What rank 0 tells the others: the plans to try, or why there are none."""

    plans: list[tuple[str, list[dict[str, Any]]]]
    problem: str = ""


def compare(case: Case, codec: Codec, repeat: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Predict and take steps with every schedule; return both. Every rank has to call this, after ``hvd.init()``.

    Raises:
        ConfigError: the method cannot serve this world or this model.
    """
    said = tell if hvd.rank() == 0 else lambda text: None
    said(f"measuring the codec of {codec.name} on this machine")
    asked = _Asked(**_share(asdict(_ask(case, codec)) if hvd.rank() == 0 else None, "plan.asked")[0])
    if asked.problem:
        raise ConfigError(asked.problem)
    torch.set_num_threads(1)
    bench = _Bench(case, codec, repeat)
    said(f"measuring steps of {case.table.model} that exchange nothing, on {hvd.size()} ranks")
    t1 = calibrate(bench.pace, bench.bare_step)
    trials = []
    for schedule, document in asked.plans:
        plan = Plan.from_document(document)
        said(f"measuring schedule {schedule}: {len(plan.buckets)} bucket(s), {repeat} steps")
        trials.append(bench.trial(schedule, plan))
    # What is predicted, with the compute that was taken.
    measured = replace(case, compute=t1)
    return comparison.document(measured, predicted(measured, codec), trials) if hvd.rank() == 0 else {}


def _share(value: Any, name: str) -> list[Any]:
    """Return every rank's value."""
    return HorovodJob(hvd.global_process_set).gather(value, Gathering(f"hvc.{name}", _TIMEOUT_SECONDS))


def _ask(case: Case, codec: Codec) -> _Asked:
    try:
        found = predicted(case, codec)
        return _Asked([(one.schedule, one.plan.document()) for one in found.timelines])
    except ConfigError as error:  # told to every rank, which raises it
        return _Asked([], str(error))


class _NullOptimizer(torch.optim.Optimizer):
    """Changes nothing, so that a step is compute and exchange and nothing else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


class _Bench:
    """The stand-in that all schedules are measured with."""

    def __init__(self, case: Case, codec: Codec, repeat: int) -> None:
        self._case, self._codec, self._repeat = case, codec, repeat
        self.pace = Pace(case.compute)
        size = min(TILE, case.table.count)
        tile = torch.randn(size, generator=torch.Generator().manual_seed(hvd.rank()))
        self._gradients = Gradients(case.table, tile)
        self._memory = untouched_memory(case.table.count)
        self._bare = self._model()

    def _model(self) -> SyntheticModel:
        return SyntheticModel(self._case.table, self._gradients, self.pace, self._memory)

    def bare_step(self) -> float:
        """Take a step without exchange; return its seconds on the slowest rank."""
        return self._step(self._bare, lambda: None)

    def _step(self, model: SyntheticModel, end: Callable[[], object]) -> float:
        for parameter in model.parameters():
            parameter.grad = None
        self._gradients.refill()
        hvd.barrier()
        began = time.perf_counter()
        model(torch.zeros(1)).backward()
        end()
        mine = time.perf_counter() - began
        return max(_share(mine, "plan.step"))

    def trial(self, schedule: str, plan: Plan) -> Trial:
        """Return what the steps with some buckets took."""
        model = self._model()
        named = list(model.named_parameters())
        options: dict[str, Any] = {"schedule": plan, "exchange": self._case.world.exchange, "timeout": _TIMEOUT_SECONDS}
        compression = Compression.create(self._codec, named, **options)
        wrapped = hvd.DistributedOptimizer(_NullOptimizer(model.parameters()), named, compression=compression)
        optimizer = compression.attach(wrapped)
        for _ in range(_WARM_UP):
            self._step(model, optimizer.step)
        reducer = compression._running()
        reducer.context.watch = watch = Watch(reducer.plan)
        before = compression.stats()["bytes_sent"]
        seconds = [self._step(model, optimizer.step) for _ in range(self._repeat)]
        sent = (compression.stats()["bytes_sent"] - before) / self._repeat
        buckets = costs_over_ranks([costs_of(costs) for costs in _share(plain_costs(watch.buckets()), "plan.buckets")])
        hvd.barrier()  # nobody closes while another rank is still under way
        compression.close()
        first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return Trial(schedule, plan, middle, (first, third), sent, tuple(buckets.values()))
