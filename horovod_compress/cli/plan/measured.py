"""Steps of a stand-in model in a real job, beside what was predicted of them.

Beside the prediction by the model there is one by measured buckets, in which neither network nor codec is computed:
what exchange and decoding take is fitted through the buckets of *all other* schedules. So no step is predicted from
its own measurement.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...codecs.base import Codec
from ...engine.tuning import costs_of, costs_over_ranks, plain_costs
from ...errors import ConfigError
from ...fronts.ranks import Ranks
from ...schedule import layerfusion
from ...schedule.costs import Arrivals, Costs, step_seconds
from ...schedule.plan import Plan
from ...schedule.trial import BucketCost, Watch
from ..common import milliseconds, table
from .prediction import Case, Found, name_of, predicted
from .report import case_document, place_text
from .synthetic import TILE, ComputeClock, Gradients, SyntheticModel, calibrate, untouched_memory

NOTES = """\
model:    predicted from bytes, link and the codec's costs, before anything was sent
refined:  predicted from buckets that were measured under the other schedules
measured: slowest rank, median [quartiles]; compute is simulated by sleeping, which leaves the cores to the exchange
error:    predicted / measured - 1"""
_WARM_UP = 2
_TIMEOUT_SECONDS = 600.0  # a slow link is no failure here


@dataclass(frozen=True)
class Trial:
    """Steps with some buckets.

    Attributes:
        seconds: the median, on the slowest rank.
        quartiles: of the steps.
        sent: bytes of one rank in a step, with headers.
        buckets: what they took.
    """

    schedule: str
    plan: Plan
    seconds: float
    quartiles: tuple[float, float]
    sent: float
    buckets: tuple[BucketCost, ...]


def compare(case: Case, codec: Codec, repeat: int, ranks: Ranks, tell: Callable[[str], None]) -> dict[str, Any]:
    """Predict and take steps with every schedule; return both, on rank 0. Every rank has to call this.

    Raises:
        ConfigError: the method cannot serve this world or this model.
    """
    first = ranks.rank == 0
    said = tell if first else lambda text: None
    said(f"measuring the codec of {codec.name} on this machine")
    asked: tuple[list[tuple[str, list[dict[str, Any]]]], str] = [], ""  # plans as plain data, or why there are none
    if first:
        try:
            asked = [(one.schedule, one.plan.document()) for one in predicted(case, codec).timelines], ""
        except ConfigError as error:
            asked = [], str(error)  # which every rank is told
    plans, problem = ranks.gather(asked, "hvc.plan.asked", _TIMEOUT_SECONDS)[0]
    if problem:
        raise ConfigError(problem)
    torch.set_num_threads(1)
    bench = _Bench(case, codec, repeat, ranks)
    said(f"measuring steps of {case.table.model} that exchange nothing, on {ranks.size} ranks")
    t1 = calibrate(bench.clock, bench.bare_step)
    trials = []
    for schedule, buckets in plans:
        plan = Plan.from_document(buckets)
        said(f"measuring schedule {schedule}: {len(plan.buckets)} bucket(s), {repeat} steps")
        trials.append(bench.trial(schedule, plan))
    # What is predicted, with the compute that was taken.
    measured = replace(case, compute=t1)
    return document(measured, predicted(measured, codec), trials) if first else {}


class _NullOptimizer(torch.optim.Optimizer):
    """Changes nothing, so that a step is compute and exchange and nothing else."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None


class _Bench:
    """The stand-in that all schedules are measured with."""

    def __init__(self, case: Case, codec: Codec, repeat: int, ranks: Ranks) -> None:
        self._case, self._codec, self._repeat, self._ranks = case, codec, repeat, ranks
        self.clock = ComputeClock(case.compute)
        size = min(TILE, case.table.count)
        tile = torch.randn(size, generator=torch.Generator().manual_seed(ranks.rank), device="cpu")
        self._gradients = Gradients(case.table, tile)
        self._memory = untouched_memory(case.table.count)
        self._bare = self._model()

    def _model(self) -> SyntheticModel:
        return SyntheticModel(self._case.table, self._gradients, self.clock, self._memory)

    def bare_step(self) -> float:
        """Take a step without exchange; return its seconds on the slowest rank."""
        return self._step(self._bare, lambda: None)

    def _step(self, model: SyntheticModel, end: Callable[[], object]) -> float:
        for parameter in model.parameters():
            parameter.grad = None
        self._gradients.refill()
        self._ranks.barrier()
        began = time.perf_counter()
        model(torch.zeros(1, device="cpu")).backward()
        end()
        mine = time.perf_counter() - began
        return max(self._ranks.gather(mine, "hvc.plan.step", _TIMEOUT_SECONDS))

    def trial(self, schedule: str, plan: Plan) -> Trial:
        """Return what the steps with some buckets took."""
        model = self._model()
        options: dict[str, Any] = {"schedule": plan, "exchange": self._case.world.exchange, "timeout": _TIMEOUT_SECONDS}
        training = self._ranks.train(model, self._codec, optimizer=_NullOptimizer(model.parameters()), **options)
        compression, end = training.compression, training.optimizer.step
        for _ in range(_WARM_UP):
            self._step(model, end)
        reducer = compression._here().reducer
        reducer.watch = watch = Watch(reducer.plan)
        before = compression.stats()["bytes_sent"]
        seconds = [self._step(model, end) for _ in range(self._repeat)]
        sent = (compression.stats()["bytes_sent"] - before) / self._repeat
        costs = self._ranks.gather(plain_costs(watch.buckets()), "hvc.plan.buckets", _TIMEOUT_SECONDS)
        buckets = costs_over_ranks([costs_of(of_rank) for of_rank in costs])
        self._ranks.barrier()  # nobody closes while another rank is still under way
        compression.close()
        first, middle, third = statistics.quantiles(seconds, n=4, method="inclusive")
        return Trial(schedule, plan, middle, (first, third), sent, tuple(buckets.values()))


# ---- beside the predictions -------------------------------------------------------------------


def refined(come: Arrivals, trials: Sequence[Trial], number: int) -> tuple[float, Costs]:
    """Return the step of one trial, by what the buckets of all others show, and these costs."""
    others = [bucket for place, trial in enumerate(trials) if place != number for bucket in trial.buckets]
    costs = layerfusion.costs_of(others)
    groups = [len(bucket.tensors) for bucket in trials[number].plan.buckets]
    return step_seconds(come, groups, costs), costs


def document(case: Case, found: Found, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return predictions, measurements and errors as plain data; seconds and bytes.

    Args:
        case: with the compute that was measured.
        found: its predictions.
    """
    best = min(trials, key=lambda trial: trial.seconds)
    return {
        "bench": "plan",
        **case_document(case),
        "ranks": case.world.ranks,
        "method": name_of(found.codec),
        "schedules": [_row(case, found, trials, number) for number in range(len(trials))],
        "best": best.schedule,
        "plan": best.plan.document(),
    }


def _row(case: Case, found: Found, trials: Sequence[Trial], number: int) -> dict[str, Any]:
    trial = trials[number]
    line = next(one for one in found.timelines if one.schedule == trial.schedule)
    model = line.slots[-1].decoded  # of the usual round, which is what was measured
    again, costs = refined(line.arrivals, trials, number)
    return {
        "schedule": trial.schedule,
        "buckets": len(trial.plan.buckets),
        "model_seconds": model,
        "refined_seconds": again,
        "median_seconds": trial.seconds,
        "q1_seconds": trial.quartiles[0],
        "q3_seconds": trial.quartiles[1],
        "model_error": model / trial.seconds - 1,
        "refined_error": again / trial.seconds - 1,
        "scaling": case.compute / trial.seconds,
        "bytes_predicted": round(line.sent),
        "bytes_sent": round(trial.sent),
        "refined_costs": {
            name: {"fixed_seconds": cost.fixed, "seconds_per_element": cost.each}
            for name, cost in (("exchange", costs.exchange), ("decode", costs.decode))
        },
    }


def text(case: Case, found: dict[str, Any]) -> str:
    """Return the same for people."""
    rows = [
        [
            row["schedule"], str(row["buckets"]), milliseconds(row["model_seconds"]), f"{row['model_error']:+.0%}",
            milliseconds(row["refined_seconds"]), f"{row['refined_error']:+.0%}",
            (f"{milliseconds(row['median_seconds'])} "
             f"[{milliseconds(row['q1_seconds'])}-{milliseconds(row['q3_seconds'])}]"),
            f"{row['scaling']:.2f}", f"{row['bytes_predicted'] / 1e6:.3g}", f"{row['bytes_sent'] / 1e6:.3g}",
        ]
        for row in found["schedules"]
    ]  # fmt: skip
    headings = ("schedule", "buckets", "model ms", "error", "refined ms", "error", "measured ms", "T1/TN")
    return "\n".join(
        [
            (
                f"{found['method']}: {place_text(case, str(found['ranks']))}; T1 measured: "
                f"{milliseconds(found['compute_seconds'])} ms"
            ),
            table([*headings, "MB predicted", "MB sent"], rows),
            NOTES,
            f"Fastest here: schedule={found['best']}",
        ]
    )
