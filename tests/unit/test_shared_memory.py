"""Gradients of two parameters in one memory are refused: each would take the other's result for its own."""

from __future__ import annotations

import pytest
import torch

from horovod_compress.errors import ConfigError
from tests.support.local import Fleet, random_grads, spec

TENSORS = [spec("a", 40), spec("b", 40)]


def test_both_are_named() -> None:
    shared = torch.ones(40)
    with Fleet(1, TENSORS, "topk") as fleet, pytest.raises(ConfigError, match="of b and a are in the same memory"):
        fleet.offer([{"a": shared, "b": shared}])


def test_memory_may_be_another_s_in_the_next_step() -> None:
    one, other = torch.ones(40), torch.ones(40)
    with Fleet(1, TENSORS, "topk") as fleet:
        fleet.step([{"a": one, "b": other}])
        fleet.step([{"a": other, "b": one}])


def test_memory_may_be_another_s_once_its_result_was_taken() -> None:
    shared = torch.ones(40)
    with Fleet(1, TENSORS, "topk", schedule="layerwise") as fleet:
        (reducer,) = fleet.reducers
        for index in range(2):
            reducer.result(index, reducer.offer(index, shared))


def test_memory_may_be_another_s_where_a_step_is_made_again() -> None:
    one, other = random_grads(2, TENSORS)[0].values()
    with Fleet(1, TENSORS, "topk") as fleet:
        (reducer,) = fleet.reducers
        step = fleet.offer([{"a": one, "b": other}])
        reducer.settle(step)
        reducer.resume(step)
        fleet.offer([{"a": other, "b": one}])
        reducer.settle(step)
