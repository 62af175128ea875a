"""Adam's step by a held second moment, and what its own formula is to find: against references, and torch's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_compress import ops
from horovod_compress.ops.dense import adam_hold_all, adam_step_all

from .support import FEW_DTYPES, LENGTHS, compare, numbers, poison, tame, work

RULE: dict[str, Any] = {"betas": (0.9, 0.999), "step": 12.0, "bound": 10.0, "left": 0.01}
STEP: dict[str, Any] = {"betas": (0.9, 0.999), "step": 12.0, "bound": 10.0, "lr": 0.01, "eps": 1e-8}
#: Of whole steps: what gradients count times, both kinds of decay, and both ends that the first moment is found from.
STEPS: list[dict[str, Any]] = [
    STEP,
    STEP | {"by": 0.7, "weight_decay": 0.1, "decoupled": True},
    STEP | {"by": -0.7, "weight_decay": 0.1, "betas": (0.3, 0.99)},
    STEP | {"betas": (0.0, 0.9), "step": 1.0},
]


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_against_the_reference(dtype: torch.dtype) -> None:
    for count in LENGTHS:
        first, grad = numbers(count, dtype, count), numbers(count, dtype, count + 1)
        square = numbers(count, work(dtype), count + 2).abs()
        compare("adam_hold_all", [poison(count, dtype)], [first], [grad], [square], None, shift=count, **RULE)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize(("rows", "length"), [(1, 100), (7, 1), (5, 31), (33, 33), (2, 4097), (300, 64)])
def test_floors_of_rows(dtype: torch.dtype, rows: int, length: int) -> None:
    count = rows * length
    given = [poison(count, dtype)], [numbers(count, dtype, 1)], [numbers(count, dtype, 2)]
    square, floor = tame(count, work(dtype), 3).abs(), tame(rows, work(dtype), 4).abs()
    compare("adam_hold_all", *given, [square], [floor], shift=length, **RULE)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_several_tensors(dtype: torch.dtype) -> None:
    counts = (1, 31, 33, 4096, 70_001)
    given = [[numbers(count, dtype, seed) for count in counts] for seed in (1, 2)]
    squares = [tame(count, work(dtype), 3).abs() for count in counts]
    floors = [tame(1, work(dtype), 4).abs() for count in counts]
    compare("adam_hold_all", [poison(count, dtype) for count in counts], *given, squares, floors, shift=1, **RULE)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("rule", STEPS, ids=range(len(STEPS)))
def test_a_whole_step_against_the_reference(dtype: torch.dtype, rule: dict[str, Any]) -> None:
    for count in LENGTHS if rule is STEPS[1] else LENGTHS[::7]:
        given = [[numbers(count, dtype, count + seed)] for seed in range(3)]
        square = numbers(count, work(dtype), count + 3).abs()
        compare("adam_step_all", *given, [square], None, shift=count, **rule)
    for rows, length in ((7, 1), (5, 31), (2, 4097), (300, 64)):
        given = [[tame(rows * length, dtype, seed)] for seed in range(3)]
        square, floor = tame(rows * length, work(dtype), 3).abs(), tame(rows, work(dtype), 4).abs()
        compare("adam_step_all", *given, [square], [floor], shift=length, **rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.3, 0.99)}], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_whole_step_is_torch_s_own(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Where torch's second moment is what is held, the weights are within a rounding of torch's fused step."""
    parameter = torch.nn.Parameter(tame(3000, dtype, 1))
    adam = kind([parameter], **{"lr": 0.1, "betas": (0.8, 0.99), "fused": True} | options)
    for step in range(1, 5):
        parameter.grad = tame(3000, dtype, step + 1)
        state = adam.state[parameter]
        weight, first = (
            parameter.detach().clone(),
            state["exp_avg"].clone() if state else torch.zeros(3000, dtype=dtype),
        )
        adam.step()
        group = adam.param_groups[0]
        square = adam.state[parameter]["exp_avg_sq"].double().div(1 - group["betas"][1] ** step).to(dtype)
        rule = {name: group[name] for name in ("betas", "lr", "eps", "weight_decay")}
        sign = -1.0 if group["maximize"] else 1.0
        ours = {"step": float(step), "bound": 1e9, "by": sign, "decoupled": kind is torch.optim.AdamW} | rule
        adam_step_all([weight], [first], [parameter.grad], [square], None, **ours)
        for mine, its in ((first, adam.state[parameter]["exp_avg"]), (weight, parameter.detach())):
            # What they are made of is of the order of 1. Where decay takes nearly all of a gradient, its rounding
            # counts many times in what is divided by the root of its square.
            spacing = torch.finfo(dtype).eps * its.abs().clamp(min=1.0)
            clear = (square > 0.01) | (its is adam.state[parameter]["exp_avg"])
            assert bool(((mine - its).abs() <= 4 * spacing)[clear].all())
            assert 4 * int(clear.sum()) > 3 * len(its)
        with torch.no_grad():
            parameter.copy_(weight), adam.state[parameter]["exp_avg"].copy_(first)


@pytest.mark.parametrize("floor", [None, 1e-30])
def test_a_whole_step_is_that_of_torch_with_a_second_moment_that_was_set(floor: float | None) -> None:
    """Both ways divide by the same: floors, the bound and large gradients are in both."""
    count = 4096
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    size = torch.logspace(-12, 3, count, dtype=torch.float64)[order]
    parameter = torch.nn.Parameter(tame(count, torch.float64, 1))
    adam = torch.optim.AdamW([parameter], lr=0.1, betas=(0.8, 0.99))
    parameter.grad = tame(count, torch.float64, 2)
    adam.step()
    state, square = adam.state[parameter], tame(count, torch.float64, 3).square() * size
    floors = None if floor is None else [torch.full((1,), floor, dtype=torch.float64)]
    for step in (2.0, 3.0, 4.0):
        parameter.grad = tame(count, torch.float64, 7) * size.flip(0)
        ours = [parameter.detach().clone()], [state["exp_avg"].clone()], [parameter.grad], [square], floors
        adam_step_all(
            *ours, betas=(0.8, 0.99), step=step, bound=10.0, lr=0.1, eps=1e-8, weight_decay=0.01, decoupled=True
        )
        given = [state["exp_avg_sq"]], [state["exp_avg"]], [parameter.grad], [square], floors
        adam_hold_all(*given, betas=(0.8, 0.99), step=step, bound=10.0, left=1.0)
        adam.step()
        assert torch.allclose(ours[0][0], parameter.detach(), rtol=1e-11, atol=1e-11)
        assert torch.allclose(ours[1][0], state["exp_avg"], rtol=1e-13, atol=1e-12)


def test_a_weight_that_has_overflown_spoils_no_moment_without_decay() -> None:
    weight, first = torch.tensor([float("inf"), 1.0]), torch.ones(2)
    adam_step_all([weight], [first], [torch.ones(2)], [torch.ones(2)], None, **STEP)
    assert weight[0] == float("inf") and torch.equal(first, torch.ones(2))


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_a_square_that_overflows_is_left_to_adam(dtype: torch.dtype) -> None:
    """It adds all of it, and stops there: of something infinite nothing can be taken off. The others are as ever."""
    count, most = 70, torch.finfo(dtype).max
    first, grad, square = tame(count, dtype, 1), tame(count, dtype, 2), tame(count, work(dtype), 3).abs()
    grad[3::7], square[4::7] = most, torch.inf
    given = [poison(count, dtype)], [first], [grad], [square], None
    compare("adam_hold_all", *given, shift=count, **RULE)
    adam_hold_all(*given, **RULE)
    (held,) = given[0]
    assert not bool(held.isnan().any())
    if grad[3].to(work(dtype)).square().isinf():
        assert torch.equal(held[3::7], torch.zeros_like(held[3::7]))


def test_torch_s_own_step_divides_by_the_root() -> None:
    """With a second moment that was set, Adam moves by lr m / (1 - b1^t) / (root + eps)."""
    parameter = torch.nn.Parameter(tame(1000, torch.float64, 1))
    adam = torch.optim.Adam([parameter], lr=0.1, betas=(0.8, 0.99))
    for step in (1.0, 2.0, 3.0):
        parameter.grad = 2 * tame(1000, torch.float64, int(step) + 1)
        root, before = tame(1000, torch.float64, 7).abs() + 1, parameter.detach().clone()
        if not adam.state[parameter]:
            state = {"step": torch.zeros(()), "exp_avg": torch.zeros(1000, dtype=torch.float64)}
            adam.state[parameter] = state | {"exp_avg_sq": torch.zeros(1000, dtype=torch.float64)}
        state = adam.state[parameter]
        given = [state["exp_avg_sq"]], [state["exp_avg"]], [parameter.grad], [root.square()], None
        ops.adam_hold_all(*given, betas=(0.8, 0.99), step=step, bound=10.0, left=0.01)
        adam.step()
        wanted = before - 0.1 * state["exp_avg"] / (1 - 0.8**step) / (root + 1e-8)
        assert torch.allclose(parameter, wanted, rtol=1e-9, atol=1e-12)


def test_no_element_moves_further_than_the_bound() -> None:
    first, grad = torch.full((64,), 3.0), torch.full((64,), 0.5)
    square, second = torch.full((64,), 1e-40), torch.zeros(64)
    adam_hold_all([second], [first], [grad], [square], None, **RULE)
    moved = first.lerp(grad, 0.1) / (1 - 0.9**12)
    after = (second * 0.999 + 0.001 * grad.square()) / (1 - 0.999**12)
    assert torch.allclose(moved / after.sqrt(), torch.tensor(10.0), rtol=1e-4)


def test_what_it_refuses() -> None:
    a, b, c, d = (torch.ones(4) for _ in range(4))
    with pytest.raises(ValueError, match="square must be a contiguous"):
        adam_hold_all([a], [b], [c], [d.double()], None, **RULE)
    with pytest.raises(ValueError, match="second"):
        adam_hold_all([a], [a], [c], [d], None, **RULE)
    with pytest.raises(ValueError, match="4 elements cannot be in 3 equal rows"):
        adam_hold_all([a], [b], [c], [d], [torch.ones(3)], **RULE)
    with pytest.raises(ValueError, match="step from 1"):
        adam_hold_all([a], [b], [c], [d], None, **(RULE | {"step": 0.0}))
    with pytest.raises(ValueError, match="firsts"):
        adam_hold_all([a], [], [c], [d], None, **RULE)
    adam_hold_all([], [], [], [], None, **RULE)
    with pytest.raises(ValueError, match="first must be"):
        adam_step_all([a], [b.double()], [c], [d], None, **STEP)
    with pytest.raises(ValueError, match="grad"):
        adam_step_all([a], [b], [a], [d], None, **STEP)
    with pytest.raises(ValueError, match="4 elements cannot be in 3 equal rows"):
        adam_step_all([a], [b], [c], [d], [torch.ones(3)], **STEP)
    with pytest.raises(ValueError, match="step from 1"):
        adam_step_all([a], [b], [c], [d], None, **(STEP | {"step": 0.5}))
