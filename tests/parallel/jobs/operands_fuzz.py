"""Fifty draws of what one rank does otherwise: an option of its compression or optimizer, its state, its steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.parallel.jobs.operands import ODD, Run, gathered
from tests.support.front import hvc, start
from tests.support.rank import check

DRAWS, STEPS = 50, 30
#: Options of the compression that one rank may have otherwise.
CREATED: dict[str, list[Any]] = {
    "seed": [1],
    "step_scale": [0.5],
    "merge": ["sampled"],
    "levels": [2],
    "full_precision_every": [7],
    "schedule": ["layerwise", "size:1MB"],
    "verify_every": [5],
    "total_steps": [100],
    "follow_lr": [True],
    "nonfinite": ["raise"],
}
#: Options of Adam.
GROUP: dict[str, list[Any]] = {
    "lr": [0.02, 0.0],
    "betas": [(0.8, 0.999), (0.9, 0.9)],
    "eps": [1e-3],
    "weight_decay": [0.1],
    "amsgrad": [True],
    "maximize": [True],
}


def _scaled(run: Run, key: str, factor: float) -> None:
    for state in run.optimizer.state.values():
        state[key].mul_(factor)


#: What one rank may do before a step.
DEEDS: dict[str, Callable[[Run], Any]] = {
    "squares": lambda run: _scaled(run, "exp_avg_sq", 1.5),
    "first moment": lambda run: _scaled(run, "exp_avg", -1.0),
    "count": lambda run: [state["step"].add_(3) for state in run.optimizer.state.values()],
    "no state": lambda run: run.optimizer.state.clear(),
    "weights": lambda run: [parameter.data.mul_(1.01) for parameter in run.model.parameters()],
    "skip": lambda run: False,
    "reload": lambda run: run.optimizer.load_state_dict(run.optimizer.state_dict()),
    "residuals": lambda run: [kept.zero_() for kept in run.compression._session.reducer.kept.residuals().values()],
}


def drawn(number: int) -> dict[str, Any]:
    """Return one draw, the same on every rank."""
    draw = random.Random(number)
    kind = draw.choice(["created", "group", "later", "deed", "deed"])
    if kind == "created":
        name = draw.choice(sorted(CREATED))
        return {"kind": kind, "name": name, "value": draw.choice(CREATED[name])}
    if kind == "deed":
        return {"kind": kind, "name": draw.choice(sorted(DEEDS)), "step": draw.randrange(1, 20)}
    # torch itself does not bear "amsgrad" where it has made its state already.
    name = draw.choice(sorted(GROUP.keys() - ({"amsgrad"} if kind == "later" else set())))
    return {"kind": kind, "name": name, "value": draw.choice(GROUP[name]), "step": draw.randrange(1, 20)}


def trial(draw: dict[str, Any]) -> dict[str, Any]:
    """Train with one draw; return what came of it."""
    odd = {draw["name"]: draw["value"]} if ODD and "value" in draw else {}
    group = {"weight_decay": 0.01}
    try:
        run = Run(group | (odd if draw["kind"] == "group" else {}), **(odd if draw["kind"] == "created" else {}))
    except hvc.HorovodCompressError as error:
        return {"kind": type(error).__name__, "said": str(error), "silent": []}

    def meddle(run: Run) -> Any:
        if not ODD or run.steps != draw.get("step"):
            return None
        if draw["kind"] == "later":
            for each in run.plain.param_groups:
                each.update(odd)
        return DEEDS[draw["name"]](run) if draw["kind"] == "deed" else None

    return run.until_they_differ(meddle, STEPS)


def fuzz() -> dict[str, Any]:
    silent, refused = [], 0
    for number in range(DRAWS):
        draw = drawn(number)
        found = trial(draw)
        kinds = gathered([found["kind"], found["silent"]])
        if any(kind != found["kind"] or other for kind, other in kinds) or "hardware" in found["said"]:
            silent.append({"draw": draw, "found": kinds, "said": found["said"]})
        refused += found["kind"] == "MismatchError"
    return {"silent": silent, "drawn": DRAWS, "refused": refused}


if __name__ == "__main__":
    start()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    check("fuzz", lambda: found.update(fuzz()))
    for name, value in found.items():
        check(name, lambda value=value: value)
