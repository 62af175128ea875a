"""Momentum upon momentum is refused, and momentum upon what waits for long is spoken of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_compress import heavy_ball
from horovod_compress.errors import ConfigError
from horovod_compress.methods import parse, per_layer

PARAMETERS = [torch.zeros(3, requires_grad=True)]
SGD, HEAVY = torch.optim.SGD(PARAMETERS, lr=0.1), torch.optim.SGD(PARAMETERS, lr=0.1, momentum=0.9)
ADAM = torch.optim.Adam(PARAMETERS)


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("dgc", {}, "dgc keeps a momentum of its own, momentum=0.9: together they diverge"),
        ("signum", {}, "give the optimizer momentum=0, or signum beta=0"),
        ("sketch_fusion", {"momentum": 0.5}, "SGD has momentum=0.9, and sketch_fusion keeps"),
    ],
)
def test_momentum_upon_momentum_is_refused(method: str, options: dict[str, Any], said: str) -> None:
    methods, _ = parse(method, options)
    with pytest.raises(ConfigError, match=said):
        heavy_ball.refuse_twice(HEAVY, methods)
    heavy_ball.refuse_twice(SGD, methods)
    heavy_ball.refuse_twice(ADAM, methods)


@pytest.mark.parametrize(
    ("method", "options"),
    [("dgc", {"momentum": 0.0}), ("signum", {"beta": 0.0}), ("marsit", {}), ("onebit_adam", {}), ("sketch_fusion", {})],
)
def test_one_momentum_is_enough(method: str, options: dict[str, Any]) -> None:
    heavy_ball.refuse_twice(HEAVY, parse(method, options)[0])


@pytest.mark.parametrize(
    ("method", "options", "steps"),
    [
        ("randomk", {"density": 0.1}, 10),
        ("topk", {}, 100),
        ("stc", {}, 100),
        ("sparse_binary", {"preset": 1}, 1000),
        ("sketch_fusion", {}, 20),
        ("dgc", {"momentum": 0.0, "ramp_steps": 100}, 1000),
    ],
)
def test_what_waits_for_long_and_counts_ten_times_is_spoken_of(
    method: str, options: dict[str, Any], steps: int
) -> None:
    methods, _ = parse(method, options)
    text = heavy_ball.advice(HEAVY, methods)
    assert text and text.startswith(f"with {method} an element is sent about once in {steps} steps, and momentum=0.9")
    assert heavy_ball.advice(SGD, methods) is None
    assert heavy_ball.advice(ADAM, methods) is None


@pytest.mark.parametrize(
    ("method", "options"),
    [("none", {}), ("marsit", {}), ("powersgd", {}), ("topk", {"density": 0.3}), ("randomk", {"scaled": True})],
)
def test_nothing_is_said_of_what_does_not_wait(method: str, options: dict[str, Any]) -> None:
    assert heavy_ball.advice(HEAVY, parse(method, options)[0]) is None


def test_of_several_methods_the_one_that_waits_longest_is_named() -> None:
    methods = per_layer({"a": "topk", "b": "sketch_fusion", "*": "marsit"})
    text = heavy_ball.advice(HEAVY, methods)
    assert text and text.startswith("with topk")
