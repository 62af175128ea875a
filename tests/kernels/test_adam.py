"""Adam's second moment as its own step is to find it: the kernel against the reference, and against torch's step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_compress import ops
from horovod_compress.ops.dense import adam_hold_all

from .support import DTYPES, LENGTHS, compare, numbers, poison, tame, work

RULE: dict[str, Any] = {"betas": (0.9, 0.999), "step": 12.0, "bound": 10.0, "left": 0.01}


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_reference(dtype: torch.dtype) -> None:
    for count in LENGTHS:
        first, grad = numbers(count, dtype, count), numbers(count, dtype, count + 1)
        square = numbers(count, work(dtype), count + 2).abs()
        compare("adam_hold_all", [poison(count, dtype)], [first], [grad], [square], None, shift=count, **RULE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "length"), [(1, 100), (7, 1), (5, 31), (33, 33), (2, 4097), (300, 64)])
def test_floors_of_rows(dtype: torch.dtype, rows: int, length: int) -> None:
    count = rows * length
    given = [poison(count, dtype)], [numbers(count, dtype, 1)], [numbers(count, dtype, 2)]
    square, floor = tame(count, work(dtype), 3).abs(), tame(rows, work(dtype), 4).abs()
    compare("adam_hold_all", *given, [square], [floor], shift=length, **RULE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_several_tensors(dtype: torch.dtype) -> None:
    counts = (1, 31, 33, 4096, 70_001)
    given = [[numbers(count, dtype, seed) for count in counts] for seed in (1, 2)]
    squares = [tame(count, work(dtype), 3).abs() for count in counts]
    floors = [tame(1, work(dtype), 4).abs() for count in counts]
    compare("adam_hold_all", [poison(count, dtype) for count in counts], *given, squares, floors, shift=1, **RULE)


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
