"""Which parameters move by steps that are linear in what methods decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from tests.golden.trained import HELD, Ranks, adamw, sgd
from tests.support.local import random_grads, spec

SPECS = [spec(name, 16, 300) for name in "abc"]


class Lars(torch.optim.SGD):
    """A step of its own, which is not that of its base."""

    def step(self, closure: Any = None) -> None:
        raise AssertionError("not called")


def both(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    first, *others = parameters
    return [sgd([first]), adamw(others)]


@pytest.mark.parametrize("schedule", ["single", "layerwise"])
@pytest.mark.parametrize(
    ("optimizer", "linear"),
    [
        (sgd, {"a", "b", "c"}),
        (adamw, set()),
        (lambda parameters: Lars(parameters, lr=0.1), set()),
        (both, {"a"}),
    ],
)
def test_what_sgd_moves(optimizer: Callable[[Any], Any], linear: set[str], schedule: str) -> None:
    with Ranks(SPECS, "marsit", optimizer, {"second_moment": "auto"}, world=2, schedule=schedule) as ranks:
        for reducer in ranks.fleet.reducers:
            found = {
                state.bucket.tensors[position].name for state in reducer.buckets for position in state.memory.linear
            }
            assert found == linear


@pytest.mark.parametrize(("optimizer", "meet"), [(sgd, {}), (adamw, HELD)])
def test_two_ranks_of_a_front_take_the_larger_step(optimizer: Callable[[Any], Any], meet: dict[str, Any]) -> None:
    """After exact rounds, results are those of a step of 1.8; with a second moment of its own, of one of 1.5."""

    def results(optimizer: Callable[[Any], Any], meet: dict[str, Any], **options: Any) -> torch.Tensor:
        with Ranks(SPECS, "marsit", optimizer, meet | {"match_norm": False}, 2, warmup_steps=2, **options) as ranks:
            found = [ranks.step(random_grads(2, SPECS, seed=seed))[0]["a"] for seed in range(4)]
        return torch.stack(found)

    own = results(optimizer, meet)
    assert torch.equal(own, results(optimizer, meet, step_scale=1.8))
    assert not torch.equal(own, results(optimizer, meet, step_scale=1.5))
    alone = {"second_moment": "own"}
    assert torch.equal(results(adamw, alone), results(adamw, alone, step_scale=1.5))
