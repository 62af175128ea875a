"""Factors of low rank: every kernel against the reference, bit for bit, and against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from horovod_compress import ops
from tests.support.marks import each_value

from .support import DTYPES, KEY, compare, numbers, poison, tame, work

SHAPES = [(1, 1), (2, 3), (3, 31), (5, 32), (4, 33), (7, 64), (2, 1025), (1025, 2), (33, 100), (255, 65), (513, 40)]
RANKS = (1, 2, 3, 4, 5, 8, 11)
FACTORS = (torch.float32, torch.float64)


def _given(
    rows: int, columns: int, rank: int, dtype: torch.dtype, *, wild: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradient, residual, left and right."""
    make = numbers if wild else tame
    kind, count = work(dtype), rows * columns
    grad, residual = make(count, dtype, count), make(count, kind, count + 1)
    return grad, residual, tame(rank * rows, kind, 3), tame(rank * columns, kind, 4)


@each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wild", [False, True])
def test_products(dtype: torch.dtype, wild: bool) -> None:
    for number, (rows, columns) in enumerate(SHAPES):
        for rank in RANKS:
            grad, residual, left, right = _given(rows, columns, rank, dtype, wild=wild)
            given = residual if (number + rank) % 3 else None
            compare("lowrank_left", grad, given, rows, right, poison(left.numel(), left.dtype), shift=number)
            compare("lowrank_right", grad, given, rows, left, poison(right.numel(), right.dtype), shift=rank)
            compare("lowrank_decode", left, right, rows, grad, given, scale=0.3, shift=number + rank)


@pytest.mark.parametrize("shape", [(70, 3000), (3000, 70)])
def test_products_of_many_tiles_and_blocks(shape: tuple[int, int]) -> None:
    rows, columns = shape
    grad, residual, left, right = _given(rows, columns, 4, torch.float32, wild=False)
    compare("lowrank_left", grad, residual, rows, right, poison(4 * rows, torch.float32), shift=5)
    compare("lowrank_right", grad, residual, rows, left, poison(4 * columns, torch.float32), shift=5)
    x = (grad + residual).double().view(rows, columns)
    found = [poison(4 * rows, torch.float32), poison(4 * columns, torch.float32)]
    assert ops.lowrank_left(grad, residual, rows, right, found[0]) == 0
    ops.lowrank_right(grad, residual, rows, left, found[1])
    wanted = right.double().view(4, -1) @ x.T, left.double().view(4, -1) @ x
    for mine, exact in zip(found, wanted, strict=True):
        assert torch.allclose(mine.double(), exact.flatten(), rtol=1e-5, atol=1e-3)


@each_value
@pytest.mark.parametrize("dtype", FACTORS)
@pytest.mark.parametrize("rank", RANKS)
def test_orthonormal_lines(dtype: torch.dtype, rank: int) -> None:
    """Against the reference; nearly dependent lines are orthonormal too, and as good a basis as any."""
    for count in (rank, 33, 100, 1025, 5000):
        if count < rank:
            continue
        lines = tame(rank * count, dtype, count)
        close = lines.clone().view(rank, count)
        close[1:] = close[0] + 1e-3 * close[1:]
        for given in (lines, close.flatten(), numbers(rank * count, dtype, count), lines * 1e-40):
            compare("lowrank_orthonormalise", given, rank, shift=count)
        for given in (lines.clone(), close.flatten().clone(), lines * (1e-40 if dtype is torch.float32 else 1e-300)):
            ops.lowrank_orthonormalise(given, rank)
            found = given.double().view(rank, count)
            error = (found @ found.T - torch.eye(rank, dtype=torch.float64)).abs().max()
            assert error < (2e-6 if dtype is torch.float32 else 1e-14)


@pytest.mark.parametrize("dtype", FACTORS)
def test_lines_that_are_not_independent_become_zero(dtype: torch.dtype) -> None:
    first = torch.arange(1, 50, dtype=dtype)
    infinite = first.clone()
    infinite[3] = float("inf")
    lines = torch.stack([first, torch.zeros_like(first), first * 4, infinite, first * float("nan"), first.flip(0)])
    given = lines.flatten()
    ops.lowrank_orthonormalise(given, 6)
    found = given.view(6, -1)
    assert found.isfinite().all() and [bool(line.any()) for line in found] == [True, False, False, False, False, True]


@pytest.mark.parametrize("dtype", FACTORS)
def test_start(dtype: torch.dtype) -> None:
    """Lines keep their direction in every bit; what is zero or not finite is drawn."""
    for columns in (1, 2, 33, 500):
        for offset in (0, 1, 6):
            kept = tame(5 * columns, dtype, columns).view(5, columns)
            kept[0] *= 1e-30
            kept[1] = 0
            kept[2, columns // 2] = float("nan")
            kept[3] = 1e-43 if dtype is torch.float32 else 1e-320
            compare("lowrank_start", kept.flatten(), poison(kept.numel(), dtype), 5, KEY, offset=offset, shift=columns)
            compare("lowrank_start", numbers(5 * columns, dtype, 1), poison(kept.numel(), dtype), 5, KEY, offset=offset)
            right = poison(kept.numel(), dtype)
            ops.lowrank_start(kept.flatten(), right, 5, KEY, offset=offset)
            found = right.view(5, columns)
            assert bool((found.abs().amax(1) < 4).all()) and bool(found.isfinite().all())
            ratio = found[4] / kept[4]
            assert bool((ratio == ratio[0]).all()) and float(ratio[0]).hex().startswith("0x1.0000000000000p")
    drawn = poison(4000, dtype)
    ops.lowrank_start(torch.zeros(4000, dtype=dtype), drawn, 4, KEY)
    assert abs(float(drawn.mean())) < 0.05 and abs(float(drawn.square().mean()) - 1 / 3) < 0.03


def test_what_is_not_finite_is_counted_once() -> None:
    grad = torch.ones(60)
    grad[[3, 17, 59]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    for rank in RANKS:
        assert ops.lowrank_left(grad, None, 6, torch.ones(rank * 10), torch.zeros(rank * 6)) == 3


def test_threads_change_nothing(few_threads: None) -> None:
    before, found = torch.get_num_threads(), []
    grad, residual, left, right = _given(1501, 2003, 5, torch.float32, wild=False)
    for threads in (1, 3):
        torch.set_num_threads(threads)
        outputs = [poison(factor.numel(), torch.float32) for factor in (left, right)]
        outputs += [grad.clone(), residual.clone()]
        ops.lowrank_left(grad, residual, 1501, right, outputs[0])
        ops.lowrank_right(grad, residual, 1501, left, outputs[1])
        ops.lowrank_decode(left, right, 1501, *outputs[2:], scale=0.5)
        found.append(outputs)
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _f(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


MEMORY = _f(200)
REFUSED = {
    "grad must be rows": lambda: ops.lowrank_left(_f(64), None, 7, _f(8), _f(8)),
    "right must be rank": lambda: ops.lowrank_left(_f(64), None, 8, _f(9), _f(8)),
    "left must be a": lambda: ops.lowrank_left(_f(64), None, 8, _f(8), _f(9)),
    "residual must be": lambda: ops.lowrank_right(_f(64), _f(63), 8, _f(8), _f(8)),
    "right and left must not": lambda: ops.lowrank_right(_f(64), None, 8, MEMORY[:8], MEMORY[4:12]),
    "left and grad must not": lambda: ops.lowrank_left(MEMORY[:64], None, 8, _f(8), MEMORY[60:68]),
    "residual and grad": lambda: ops.lowrank_decode(_f(8), _f(8), 8, MEMORY[:64], MEMORY[60:124]),
    "lines must be rank": lambda: ops.lowrank_orthonormalise(_f(10), 3),
    "lines must be float32": lambda: ops.lowrank_orthonormalise(_f(10, torch.float16), 2),
    "kept must be rank": lambda: ops.lowrank_start(_f(10), _f(10), 0, KEY),
    "right and kept": lambda: ops.lowrank_start(MEMORY[:8], MEMORY[4:12], 2, KEY),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
