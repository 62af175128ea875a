"""Momentum upon momentum is refused, and momentum upon what waits for long is spoken of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_compress.codecs.registry import available
from horovod_compress.engine.methods import parse, per_layer
from horovod_compress.engine.optimizer import momentum
from horovod_compress.errors import ConfigError

PARAMETERS = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
NAMED = list(zip("abc", PARAMETERS, strict=True))
SGD, HEAVY = torch.optim.SGD(PARAMETERS, lr=0.1), torch.optim.SGD(PARAMETERS, lr=0.1, momentum=0.9)
ADAM, ADAM_WITHOUT = torch.optim.Adam(PARAMETERS), torch.optim.Adam(PARAMETERS, betas=(0.0, 0.999))


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("dgc", {}, "dgc applies its own momentum, momentum=0.9: together they diverge"),
        ("signum", {}, "give the optimizer momentum=0, or signum beta=0"),
        ("sketch_fusion", {"momentum": 0.5}, "SGD has momentum=0.9, and sketch_fusion applies"),
    ],
)
def test_momentum_upon_momentum_is_refused(method: str, options: dict[str, Any], said: str) -> None:
    methods, _ = parse(method, options)
    with pytest.raises(ConfigError, match=said):
        momentum.refuse_twice(HEAVY, methods, NAMED)
    momentum.refuse_twice(SGD, methods, NAMED)


@pytest.mark.parametrize(("method", "option"), [("dgc", "momentum"), ("gmc", "momentum"), ("signum", "beta")])
def test_adams_upon_a_methods_own_is_spoken_of(method: str, option: str) -> None:
    """A small model with AdamW ended far above its first loss with gmc. The control has one of them."""
    methods, _ = parse(method, {})
    momentum.refuse_twice(ADAM, methods, NAMED)
    text = momentum.advice(ADAM, methods, NAMED)
    assert text and text.startswith("Adam has betas=(0.9, 0.999), and ")
    assert text.endswith(f"give the optimizer betas=(0.0, 0.999), or {parse(method, {})[0].codec('a').name} {option}=0")
    for optimizer, chosen in ((ADAM_WITHOUT, methods), (ADAM, parse(method, {option: 0.0})[0])):
        assert "its own momentum" not in (momentum.advice(optimizer, chosen, NAMED) or "")


@pytest.mark.parametrize(
    ("method", "speaks"), [("marsit", True), ("topk", True), ("dgc", True), ("global_qsgd", False)]
)
def test_what_lbfgs_does_not_bear_is_spoken_of(method: str, speaks: bool) -> None:
    text = momentum.advice(torch.optim.LBFGS(PARAMETERS), parse(method, {})[0], NAMED)
    assert bool(text and text.startswith("LBFGS takes the curvature")) == speaks


@pytest.mark.parametrize(
    ("method", "options"),
    [("dgc", {"momentum": 0.0}), ("signum", {"beta": 0.0}), ("marsit", {}), ("onebit_adam", {}), ("sketch_fusion", {})],
)
def test_one_momentum_is_enough(method: str, options: dict[str, Any]) -> None:
    momentum.refuse_twice(HEAVY, parse(method, options)[0], NAMED)


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
    text = momentum.advice(HEAVY, methods, NAMED)
    assert text and text.startswith(f"with {method} an element is sent about once in {steps} steps, and momentum=0.9")
    assert momentum.advice(SGD, methods, NAMED) is None
    assert momentum.advice(ADAM, methods, NAMED) is None


@pytest.mark.parametrize("optimizer", [SGD, ADAM_WITHOUT])
def test_a_momentum_of_the_methods_own_counts_as_well(optimizer: torch.optim.Optimizer) -> None:
    text = momentum.advice(optimizer, parse("dgc", {"momentum": 0.5})[0], NAMED)
    assert text and "once in 1000 steps, and momentum=0.5 counts delayed gradients 2 times" in text
    assert "give dgc momentum=0" in text
    assert momentum.advice(optimizer, parse("dgc", {"momentum": 0.0})[0], NAMED) is None
    assert momentum.advice(optimizer, parse("dgc", {"density": 0.2})[0], NAMED) is None


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("none", {}),
        ("marsit", {"warmup_steps": 30}),
        ("powersgd", {}),
        ("topk", {"density": 0.3}),
        ("randomk", {"scaled": True}),
    ],
)
def test_nothing_is_said_of_what_does_not_wait(method: str, options: dict[str, Any]) -> None:
    assert momentum.advice(HEAVY, parse(method, options)[0], NAMED) is None


@pytest.mark.parametrize("method", ["marsit", "ef_signsgd", "onebit", "onebit_adam"])
def test_some_begin_with_exact_rounds_under_momentum(method: str) -> None:
    methods = parse(method, {})[0]
    assert momentum.exact_first(HEAVY, methods, NAMED) == momentum.EXACT_FIRST
    assert momentum.exact_first(SGD, methods, NAMED) == momentum.exact_first(ADAM, methods, NAMED) == 0
    for total, first in ((1, 1), (100, 10), (10_000, momentum.EXACT_FIRST)):
        assert momentum.exact_first(HEAVY, methods, NAMED, total) == first
    assert momentum.exact_first(ADAM, methods, NAMED, 100) == 0


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("marsit", {"compensation": "none"}),
        ("marsit", {"step_size": 0.01}),
        ("sketch_fusion", {"error_feedback": "sketch", "cells": 0.5}),
        ("qsgd", {}),
    ],
)
def test_options_may_take_that_back(method: str, options: dict[str, Any]) -> None:
    assert momentum.exact_first(HEAVY, parse(method, options)[0], NAMED) == 0


def test_these_are_all_that_do() -> None:
    begin_so = [method for method in available() if momentum.exact_first(HEAVY, parse(method, {})[0], NAMED)]
    named = {"marsit", "ef_signsgd", "onebit", "onebit_adam", "sketch_fusion", "sparse_dithering"}  # in choosing.md
    assert {*begin_so} == named | {"cd_sgd"}  # a preset of one of these


def test_of_several_methods_the_one_that_waits_longest_is_named() -> None:
    methods = per_layer({"a": "topk", "b": "sketch_fusion", "*": "marsit"})
    text = momentum.advice(HEAVY, methods, NAMED)
    assert text and text.startswith("with topk")


def test_groups_are_looked_at_with_the_methods_of_their_own_parameters() -> None:
    """A momentum elsewhere is no matter; the control has both at the same place."""
    light, heavy = {"params": PARAMETERS[:1]}, {"params": PARAMETERS[1:], "momentum": 0.9}
    optimizer = torch.optim.SGD([light, heavy], lr=0.1)
    momentum.refuse_twice(optimizer, per_layer({"a": "dgc", "*": "marsit"}), NAMED)
    assert momentum.advice(optimizer, per_layer({"a": "topk", "*": "signsgd"}), NAMED) is None
    with pytest.raises(ConfigError, match="dgc applies"):
        momentum.refuse_twice(optimizer, per_layer({"b": "dgc", "*": "marsit"}), NAMED)
    assert momentum.advice(optimizer, per_layer({"b": "topk", "*": "marsit"}), NAMED)


def test_momentum_that_a_method_bears_hides_no_other() -> None:
    groups = [{"params": PARAMETERS[:1], "momentum": 0.999}, {"params": PARAMETERS[1:], "momentum": 0.9}]
    text = momentum.advice(torch.optim.SGD(groups, lr=0.1), per_layer({"a": "none", "*": "topk"}), NAMED)
    assert text and text.startswith("with topk") and "momentum=0.9 " in text


@pytest.mark.parametrize(
    ("group", "speaks"),
    [({"momentum": 1.0}, True), ({"momentum": None}, False), ({"momentum": 0.9, "dampening": 0.9}, False)],
)
def test_odd_momentum(group: dict[str, Any], speaks: bool) -> None:
    optimizer = torch.optim.SGD(PARAMETERS, lr=0.1)
    optimizer.param_groups[0].update(group)
    methods, _ = parse("topk", {"density": 0.1})
    assert bool(momentum.advice(optimizer, methods, NAMED)) is speaks
