"""Golden runs with an optimizer: held second moments, norms, masks, learning rates, scales, and update mode."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from horovod_compress.codecs.masked import masked
from horovod_compress.engine.saved import checkpoint, checksums
from horovod_compress.fronts.steps import Steps
from horovod_compress.fronts.updates import distributed_update_optimizer
from horovod_compress.schedule.plan import TensorSpec
from tests.golden.play import (
    FIRST,
    MIDDLE,
    STEPS,
    TENSORS,
    WORLD,
    Found,
    Roots,
    Run,
    digest_of_all,
    grads,
    numbers,
    played,
    two_buckets,
    what_is_left,
)
from tests.support.local import Fleet, all_same
from tests.unit.test_update import Compression

START = 1000  # the step whose numbers are the first weights

Grads = list[dict[str, Tensor]]


def first_weights(specs: Sequence[TensorSpec]) -> dict[str, nn.Parameter]:
    """Return parameters, the same on every rank."""
    return {t.name: nn.Parameter(numbers(t, START, at)) for at, t in enumerate(specs)}


class Ranks:
    """The ranks of a job.

    Args:
        optimizer: makes a rank's optimizer, or a list of several.
        meet: options of the front's ``attach()``.
        options: of the method, and those of all methods.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        method: Any,
        optimizer: Callable[[Any], Any],
        meet: dict[str, Any] | None = None,
        world: int = WORLD,
        **options: Any,
    ) -> None:
        self.fleet = Fleet(world, specs, method, **options)
        self.models = [first_weights(specs) for _ in range(world)]
        self.optimizers = [optimizer(model.values()) for model in self.models]
        self.steps = [
            Steps(reducer, self.fleet.methods, list(model.items()), lambda value: [value] * world)
            for reducer, model in zip(self.fleet.reducers, self.models, strict=True)
        ]
        given = {"second_moment": "auto", "warmup_steps": None, "rebuild_every": None, "match_norm": True} | (
            meet or {}
        )
        match, step = given.pop("match_norm"), given.pop("step", "torch")
        for steps, mine in zip(self.steps, map(_several, self.optimizers), strict=True):
            steps.meet(mine, *given.values(), match_norm=match, step=step)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.fleet.__exit__(None, None, None)

    def step(self, grads: Grads) -> Grads:
        """Do one step with every rank's gradients; return the results."""
        for steps in self.steps:
            steps.begin()
        results = self.fleet.step(grads)
        assert all(reducer.wait_idle(5.0) for reducer in self.fleet.reducers)
        for model, optimizer, result in zip(self.models, self.optimizers, results, strict=True):
            for name, parameter in model.items():
                parameter.grad = result[name].clone()
            with Roots():
                for one in _several(optimizer):
                    one.step()
        assert all_same([{n: p.detach() for n, p in model.items()} for model in self.models])
        return results

    def save(self) -> list[dict[str, Any]]:
        """Return every rank's state, as its front saves it."""
        each = zip(self.fleet.reducers, self.steps, strict=True)
        return [checkpoint.save(r, self.fleet.methods, s.state() | {"exchanged": "gradients"}) for r, s in each]

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        for steps, state in zip(self.steps, states, strict=True):
            steps.check(state, "restore")
            steps.load(state, "restore", begun=False)


@dataclass(frozen=True)
class Checkpoint:
    """What a job saves: the states of compression and optimizer, and the weights, of every rank."""

    own: list[dict[str, Any]]
    optimizers: list[dict[str, Any]]
    weights: list[list[Tensor]]

    @classmethod
    def of(cls, team: Ranks) -> Checkpoint:
        states = [copy.deepcopy(optimizer.state_dict()) for optimizer in team.optimizers]
        return cls(team.save(), states, [[p.detach().clone() for p in model.values()] for model in team.models])

    def resume(self, team: Ranks) -> None:
        team.load(self.own)
        each = zip(team.optimizers, self.optimizers, team.models, self.weights, strict=True)
        for optimizer, state, model, before in each:
            optimizer.load_state_dict(state)
            with torch.no_grad():
                for p, q in zip(model.values(), before, strict=True):
                    p.copy_(q)


def _several(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        parameters, lr=0.0625, betas=(0.75, 0.875), eps=2.0**-20, weight_decay=0.125, foreach=False
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0625, momentum=0.75, foreach=False)


def falling(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD whose rate falls further with its first step than residuals follow."""

    def fall(optimizer: torch.optim.Optimizer, *given: Any) -> None:
        optimizer.param_groups[0]["lr"] = 2.0**-10

    found = torch.optim.SGD(parameters, lr=0.0625, foreach=False)
    found.register_step_post_hook(fall)
    return found


class Scaler:
    """The scale of gradients."""

    def __init__(self) -> None:
        self._scale = 4.0

    def get_scale(self) -> float:
        return self._scale

    def update(self, new_scale: float) -> None:
        self._scale = new_scale


HELD = {"second_moment": "shared", "warmup_steps": 2, "rebuild_every": 3}


def trained(method: Any, optimizer: Any, meet: dict[str, Any], what: str = "", **options: Any) -> Found:
    """Return what came of steps with an optimizer, the weights and the front's own state too.

    Args:
        meet: options of ``attach()``.
        what: happens, in the middle or from the beginning.
    """
    options = {"schedule": two_buckets(), "verify_every": 2} | options

    def step(number: int) -> list[dict[str, Tensor]]:
        for model, mine in zip(ranks.models, ranks.optimizers, strict=True):
            if what == "masked" and not number:
                with torch.no_grad():
                    model["wide"][:, ::3] = 0.0
            if what == "thawed":
                model["wide"].requires_grad_(number >= MIDDLE)
            if what == "rates" and number == MIDDLE:
                mine.param_groups[0]["lr"] /= 4
        if what == "scaled" and number == MIDDLE:
            scaler.update(16.0)
        given = grads(number, TENSORS)
        for mine in given:
            mine["tall"][:, 1] = 0.0  # for which no rank has a gradient, until later
            if number > MIDDLE:
                mine["tall"][5, 1] = 1.0
            for grad in mine.values():
                grad.mul_(scaler.get_scale() if what == "scaled" else 1.0)
        return ranks.step(given)

    scaler = Scaler()
    with Ranks(TENSORS, method, optimizer, meet, **options) as ranks:
        for steps in ranks.steps if what == "scaled" else ():
            steps.scale.follow(scaler)
        found = played(ranks.fleet, step)
        weights = digest_of_all({n: p.detach() for n, p in model.items()} for model in ranks.models)
        more = [steps.state() for steps in ranks.steps]
    moments = [mine.get("second_moment", {}) for mine in more]
    if any(moments):
        found["moments"] = digest_of_all({n: saved["moment"] for n, saved in mine.items()} for mine in moments)
    return found | {"weights": weights, "beside": sorted(more[0])}


def updated(method: Any, optimizer: Any, delay: int, mode: dict[str, Any], **options: Any) -> Found:
    """Return what came of local steps whose updates are exchanged; results are the weights of every rank."""
    options = {"schedule": two_buckets(), "verify_every": 2} | options
    models = [first_weights(TENSORS) for _ in range(WORLD)]
    with Fleet(WORLD, TENSORS, method, **options) as fleet:
        made = [
            distributed_update_optimizer(optimizer(m.values()), m.items(), Compression(fleet, rank, m), delay, **mode)
            for rank, m in enumerate(models)
        ]
        for reducer in fleet.reducers:
            reducer.verification.weights = None  # they are equal, and comparing them sends bytes of its own

        def train(rank: int) -> list[dict[str, Tensor]]:
            after = []
            for number in range(STEPS):
                for name, grad in grads(number, TENSORS)[rank].items():
                    models[rank][name].grad = grad
                with Roots():
                    made[rank].step()
                after.append({name: parameter.detach().clone() for name, parameter in models[rank].items()})
            return after

        with ThreadPoolExecutor(WORLD) as pool:
            weights = [list(each) for each in zip(*pool.map(train, range(WORLD)), strict=True)]
        found = what_is_left(fleet)
        more = [mine.state_dict()["horovod_compress"] for mine in made]
    tensors_ = [dict(checksums.tensors(state)) for state in more]
    return {"results": [digest_of_all(each) for each in weights], "beside": digest_of_all(tensors_)} | found


def trainings() -> dict[str, Run]:
    found: dict[str, Run] = {}
    for sample in FIRST:
        codec = sample.codec()
        quick = sample.method in ("marsit", "onebit_adam")
        found[f"{sample.name} | AdamW, held"] = Run(partial(trained, codec, adamw, HELD), quick, True)
        if not (getattr(codec, "momentum", 0.0) or getattr(codec, "beta", 0.0)):
            found[f"{sample.name} | SGD"] = Run(partial(trained, codec, sgd, {}, total_steps=20), quick)
            found[f"{sample.name} | SGD, rates"] = Run(partial(trained, codec, sgd, {}, "rates", follow_lr=True))
        found[f"{sample.name} | AdamW, masked"] = Run(
            partial(trained, masked(codec), adamw, HELD, "masked"), quick, True
        )
    for method in ("marsit", "topk"):
        found[f"{method} | AdamW, thawed"] = Run(
            partial(trained, method, adamw, HELD, "thawed"), method == "topk", True
        )
        found[f"{method} | AdamW, own"] = Run(
            partial(trained, method, adamw, {"second_moment": "own", "match_norm": False}), False, True
        )
        found[f"{method} | SGD, scaled"] = Run(partial(trained, method, sgd, {}, "scaled", total_steps=20))
    for method in ("none", "marsit", "topk", "sparse_binary", "powersgd"):
        play = partial(updated, method, sgd)
        found[f"{method} | SGD, updates"] = Run(partial(play, 2, {}), method == "sparse_binary")
        found[f"{method} | SGD, updates, masking"] = Run(partial(play, 1, {"momentum_masking": True}))
        held = Run(partial(updated, method, adamw, 1, HELD), method == "marsit", True)
        found[f"{method} | AdamW, updates, held"] = held
    return found
