"""Update mode with ranks that are threads: what needs neither Horovod nor processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from horovod_compress.errors import ConfigError, NonFiniteError
from horovod_compress.fronts.horovod.update import distributed_update_optimizer
from horovod_compress.schedule.plan import TensorSpec
from tests.support.local import Fleet

WORLD = 2


class Compression:
    """What update mode asks of a compression, on one rank of a fleet."""

    def __init__(self, fleet: Fleet, rank: int, named: dict[str, nn.Parameter]) -> None:
        self._fleet, self._reducer, self._named = fleet, fleet.reducers[rank], named
        self.method, self.plan = fleet.methods.name, fleet.plan
        self.communication_delay = fleet.methods.communication_delay
        self.full_precision_every = fleet.methods.full_precision_every
        self.momenta = fleet.methods.momenta

    def included(self) -> bool:
        return True

    def check_updates(self) -> None:
        pass

    def begin_updates(self) -> Any:
        return self._reducer

    def parameters(self) -> list[nn.Parameter]:
        return [self._named[name] for name in self.plan.names()]

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        return [value] * WORLD


def train(
    kind: Callable[..., torch.optim.Optimizer],
    run: Callable[[int, Any, dict[str, nn.Parameter]], None],
    method: str = "none",
    own: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[dict[str, nn.Parameter]], list[Any]]:
    """Let every rank run with its optimizer; return parameters and optimizers."""
    shapes = {"used": (40,), "unused": (30,)}
    named = [{n: nn.Parameter(torch.full(s, 0.5)) for n, s in shapes.items()} for _ in range(WORLD)]
    made, errors = [], []
    specs = [TensorSpec(n, s, "float32") for n, s in shapes.items()]
    with Fleet(WORLD, specs, method, **own or {}) as fleet:
        for rank in range(WORLD):
            plain = kind(named[rank].values())
            compression = Compression(fleet, rank, named[rank])
            made.append(distributed_update_optimizer(plain, named[rank].items(), compression, **options))

        def one(rank: int) -> None:
            try:
                run(rank, made[rank], named[rank])
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    if errors:
        raise errors[0]
    return named, made


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def test_a_parameter_without_gradients_is_left_out_of_warmup_and_rebuilding() -> None:
    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for _ in range(6):
            optimizer.zero_grad()
            named["used"].grad = torch.full((40,), 1.0 + rank)
            optimizer.step()
            assert named["unused"].grad is None

    named, made = train(adamw, run, second_moment="shared", warmup_steps=2, rebuild_every=2)
    for mine, optimizer in zip(named, made, strict=True):
        assert bool((mine["unused"] == 0.5).all()) and mine["unused"] not in optimizer.state
        assert bool((mine["used"] < 0.5).all())
    assert torch.equal(named[0]["used"], named[1]["used"])


@pytest.mark.parametrize("value", [1.0, 0.0, -0.0])
def test_a_gradient_of_one_rank_is_one_for_all(value: float) -> None:
    """Also one of nothing but zeros, of either sign: weights decay then, on all ranks."""

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        optimizer.zero_grad()
        if rank == 1:
            named["unused"].grad = torch.full((30,), value)
        optimizer.step()

    named, _ = train(adamw, run, second_moment="shared", warmup_steps=2)
    assert bool((named[0]["unused"] < 0.5).all()) and torch.equal(named[0]["unused"], named[1]["unused"])
    assert bool((named[0]["used"] == 0.5).all())


def test_flush_does_not_rebuild_the_second_moment() -> None:
    """Gradients may be cleared by then; the next exchange makes up for it."""
    seen: list[list[torch.Tensor]] = [[], []]

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for number in range(5):
            optimizer.zero_grad()
            for parameter in named.values():
                parameter.grad = torch.full(parameter.shape, 1.0 + rank)
            optimizer.step()
            if number == 1:  # one warm-up step, and one of two local steps
                optimizer.zero_grad()
                optimizer.flush()
            seen[rank].append(optimizer.state[named["used"]]["exp_avg_sq"].clone())

    options = {"second_moment": "shared", "warmup_steps": 1, "rebuild_every": 1, "communication_delay": 2}
    train(adamw, run, **options)
    for mine in seen:
        assert torch.equal(mine[0], mine[1]) and torch.equal(mine[1], mine[2])
        assert bool((mine[3] > mine[2]).all())  # the exchange after: the control


def test_step_hooks_are_called_once_before_and_after_a_load() -> None:
    counts = [[0, 0], [0, 0]]

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        part = 0

        def count(*_: Any) -> None:
            counts[rank][part] += 1

        optimizer.register_step_post_hook(count)
        for part in range(2):  # noqa: B007  count() reads it
            for parameter in named.values():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())

    train(lambda parameters: torch.optim.SGD(parameters, lr=0.1), run)
    assert counts == [[1, 1], [1, 1]]


@pytest.mark.parametrize("method", ["dgc", "sketch_fusion"])
def test_momentum_upon_momentum_is_refused(method: str) -> None:
    def nothing(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        pass

    def heavy(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    for kind in (heavy, adamw):
        with pytest.raises(ConfigError, match=f"give {method} momentum=0"):
            train(kind, nothing, method, {"momentum": 0.5, "density": 0.5})
        train(kind, nothing, method, {"momentum": 0.0, "density": 0.5})
    train(lambda p: torch.optim.SGD(p, lr=0.1), nothing, method, {"momentum": 0.5, "density": 0.5})


def test_steps_that_fail_for_numbers_that_are_not_finite_count() -> None:
    counted = []

    def run(rank: int, optimizer: Any, named: dict[str, nn.Parameter]) -> None:
        for number in range(3):
            for parameter in named.values():
                parameter.grad = torch.full_like(parameter, torch.inf if number == 1 and rank == 1 else 1.0)
            if number == 1:
                with pytest.raises(NonFiniteError):
                    optimizer.step()
            else:
                optimizer.step()
        counted.append((optimizer._updates.steps, optimizer._updates.exchanges))

    train(lambda parameters: torch.optim.SGD(parameters, lr=0.1), run)
    assert counted == [(3, 3)] * WORLD
