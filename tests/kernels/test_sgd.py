"""SGD's step: against the reference, and torch's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_compress.ops.dense import sgd_step_all

from .support import FEW_DTYPES, LENGTHS, compare, numbers, tame

#: With and without momentum, decay, both kinds of momentum, and what gradients count times.
STEPS: list[dict[str, Any]] = [
    {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "by": 0.7},
    {"lr": 0.01},
    {"lr": 0.01, "weight_decay": 0.1, "by": -1.0},
    {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "by": -0.7},
    {"lr": 0.01, "momentum": 0.5, "dampening": 0.25},
]


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("rule", STEPS, ids=range(len(STEPS)))
def test_against_the_reference(dtype: torch.dtype, rule: dict[str, Any]) -> None:
    for count in LENGTHS if rule is STEPS[0] else LENGTHS[::7]:
        weight, grad, buffer = (numbers(count, dtype, count + seed) for seed in range(3))
        buffers = [buffer] if "momentum" in rule else None
        compare("sgd_step_all", [weight], buffers, [grad], shift=count, **rule)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_several_tensors(dtype: torch.dtype) -> None:
    given = [[numbers(count, dtype, seed) for count in (1, 31, 33, 4096, 70_001)] for seed in range(3)]
    compare("sgd_step_all", *given, shift=1, **STEPS[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0, "weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.25, "maximize": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_a_step_is_torch_s_own(options: dict[str, Any], dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(tame(3000, dtype, 1))
    sgd = torch.optim.SGD([parameter], **{"lr": 0.1} | options)
    for step in range(1, 5):
        parameter.grad = tame(3000, dtype, step + 1)
        weight, buffer = parameter.detach().clone(), sgd.state[parameter].get("momentum_buffer")
        buffer = None if buffer is None else buffer.clone()
        sgd.step()
        if buffer is None and options["momentum"]:
            continue  # torch's first step has no momentum yet
        group = sgd.param_groups[0]
        rule = {name: group[name] for name in ("lr", "momentum", "dampening", "nesterov", "weight_decay")}
        by = -1.0 if group["maximize"] else 1.0
        sgd_step_all([weight], None if buffer is None else [buffer], [parameter.grad], by=by, **rule)
        moved = [(weight, parameter.detach())]
        moved += [] if buffer is None else [(buffer, sgd.state[parameter]["momentum_buffer"])]
        for mine, its in moved:
            # What they are made of is of the order of 1, and torch rounds a product and a sum at once.
            assert bool(((mine - its).abs() <= 3 * torch.finfo(dtype).eps * its.abs().clamp(min=1.0)).all())


def test_a_weight_that_has_overflown_spoils_no_momentum_without_decay() -> None:
    weight, buffer = torch.tensor([float("inf"), 1.0]), torch.ones(2)
    sgd_step_all([weight], [buffer], [torch.ones(2)], lr=0.1, momentum=0.5)
    assert weight[0] == float("inf") and torch.equal(buffer, torch.full((2,), 1.5))


def test_what_it_refuses() -> None:
    a, b, c = (torch.ones(4) for _ in range(3))
    with pytest.raises(ValueError, match="buffer must be"):
        sgd_step_all([a], [b.double()], [c], lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="grad"):
        sgd_step_all([a], [b], [a], lr=0.1, momentum=0.9)
    sgd_step_all([], [], [], lr=0.1, momentum=0.9)
