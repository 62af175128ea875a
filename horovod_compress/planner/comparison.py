"""Predicted and measured steps beside each other.

Beside the prediction by the model there is one by measured buckets, in which neither network nor codec is computed:
what exchange and decoding take is fitted through the buckets of *all other* schedules. So no step is predicted from
its own measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..schedule.costs import Arrivals, Costs, step_seconds
from ..schedule.layerfusion import costs_of
from ..schedule.plan import Plan
from ..schedule.trial import BucketCost
from .predictions import Case, Found, case_document, name_of
from .report import place_text
from .text import milliseconds, table

NOTES = """\
model:    predicted from bytes, link and the codec's costs, before anything was sent
refined:  predicted from buckets that were measured under the other schedules
measured: slowest rank, median [quartiles]; compute is simulated by sleeping, which leaves the cores to the exchange
error:    predicted / measured - 1"""


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


def refined(come: Arrivals, trials: Sequence[Trial], number: int) -> tuple[float, Costs]:
    """Return the step of one trial, by what the buckets of all others show, and these costs."""
    others = [bucket for place, trial in enumerate(trials) if place != number for bucket in trial.buckets]
    costs = costs_of(others)
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
