"""Exact selection against the reference, bit for bit, and on inputs that mislead its sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.support.marks import slow
from tests.support.sections import binary_select, top_select

from .support import BATCH_DTYPES, FEW_DTYPES, LENGTHS, compare, numbers, poison, tame, work

LARGE = 300_007  # the sample decides here, and threads share the work


def both(x: Tensor, residual: Tensor | None, k: int, shift: int = 0) -> None:
    """Compare both selections."""
    kind = work(x.dtype)
    compare(top_select, x, residual, k, poison(k, torch.int32), poison(k, kind), shift=shift)
    compare(binary_select, x, residual, k, poison(k, torch.int32), poison(1, kind), shift=shift)


def ks(count: int) -> set[int]:
    return {k for k in (0, 1, 2, count // 100, count // 7, count - 1, count) if 0 <= k <= count}


def ugly(count: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Tensors whose sample says little or the wrong thing."""
    zeros, ordinary = torch.zeros(count, dtype=dtype), tame(count, dtype, 1)
    spike, clump, few = zeros.clone(), zeros.clone(), zeros.clone()
    spike[count // 3 :][:1] = -2
    clump[count // 2 : count // 2 + count // 50] = ordinary[: count // 50] * 100
    few[:: max(count // 5, 1)] = ordinary[:: max(count // 5, 1)]
    rising = torch.arange(1, count + 1).to(dtype)
    yield from (zeros, -zeros, spike, clump, few, zeros + 0.1, zeros - 0.1, ordinary.abs(), -ordinary.abs())
    yield from (rising, -rising, rising.flip(0), ordinary.round(), ordinary**3)
    yield torch.where(torch.arange(count) % 1000 < 3, ordinary * 1000, ordinary)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_every_length(dtype: torch.dtype) -> None:
    for count in LENGTHS:
        residual = tame(count, work(dtype), count + 1) if count % 3 else None
        for k in {1, count // 3, count} & ks(count):
            both(tame(count, dtype, count), residual, k, shift=count)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_nasty_numbers(dtype: torch.dtype) -> None:
    for count in LENGTHS[::5]:
        residual = numbers(count, work(dtype), count + 1)
        residual[::3] = -numbers(count, dtype, count)[::3].to(work(dtype))
        for k in ks(count):
            both(numbers(count, dtype, count), residual if count % 2 else None, k, shift=count)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_ugly_tensors(dtype: torch.dtype) -> None:
    for count in (3, 100, 5000):
        for x in ugly(count, dtype):
            for k in ks(count):
                both(x, None, k)


@pytest.mark.parametrize("threads", [2, *slow(1, 3)])
def test_ugly_tensors_large_with_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for x in ugly(LARGE * threads, torch.float32):
            for k in (1, 3000):
                both(x, None, k)
        x, residual = numbers(LARGE * threads, torch.float32, 1), tame(LARGE * threads, torch.float32, 2)
        for k in (2999, x.numel() // 2, x.numel()):
            both(x, residual, k, shift=threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_large(dtype: torch.dtype) -> None:
    both(tame(LARGE, dtype, 1), tame(LARGE, work(dtype), 2), 3000, shift=1)
    both(numbers(LARGE, dtype, 1), None, 30_000, shift=1)


def test_a_full_list_is_cut_down() -> None:
    """Rising values: every later element is larger than all that was kept."""
    rising = torch.arange(1.0, 1_000_001.0)
    for k in (10, 40_000):
        both(rising, None, k)
        both(-rising, None, k)


def test_by_hand() -> None:
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([1.0, -3.0, 0.0, 3.0, nan, -2.0, -0.0, 3.0, -4.0])
    positions, values, mean = poison(4, torch.int32), poison(4, torch.float32), poison(1, torch.float32)
    assert top_select(x, None, 4, positions, values) == (4, 1)
    assert (positions.tolist(), values.tolist()) == ([1, 3, 7, 8], [-3.0, 3.0, 3.0, -4.0])
    assert binary_select(x, None, 2, positions[:2], mean) == (2, 1)
    assert (positions[:2].tolist(), mean.item()) == ([1, 8], -3.5)
    assert binary_select(-x, -x, 4, positions, mean) == (3, 1)
    assert (positions[:3].tolist(), mean.item()) == ([1, 5, 8], 6.0)
    assert binary_select(torch.tensor([1.0, -1.0]), None, 1, positions[:1], mean) == (1, 0)
    assert (positions[0].item(), mean.item()) == (0, 1.0)
    assert binary_select(torch.zeros(3), None, 2, positions[:2], mean) == (0, 0)
    assert mean.item() == 0.0
    assert top_select(torch.tensor([5.0, -inf, inf]), None, 2, positions[:2], values[:2]) == (2, 2)
    assert positions[:2].tolist() == [1, 2]


def test_the_sides_are_weighed_by_what_they_remove() -> None:
    """One large element removes 9, four of 2 remove 16."""
    positions, mean = poison(4, torch.int32), poison(1, torch.float32)
    x = torch.tensor([3.0, -2.0, -2.0, 0.0, -2.0, -2.0])
    assert binary_select(x, None, 4, positions, mean) == (4, 0)
    assert (positions.tolist(), mean.item()) == ([1, 2, 4, 5], -2.0)
    x[0] = 4.0
    assert binary_select(x, None, 4, positions, mean) == (1, 0)
    assert (positions[0].item(), mean.item()) == (0, 4.0)


@pytest.mark.parametrize("scale", [1e200, 1e-200, 1e-310])
def test_the_sides_are_weighed_where_their_squares_are_no_numbers(scale: float) -> None:
    x = torch.tensor([1.0, -5.0, 0.5, -4.0], dtype=torch.float64) * scale
    positions, mean = poison(2, torch.int32), poison(1, torch.float64)
    assert binary_select(x, None, 2, positions, mean) == (2, 0)
    assert (positions.tolist(), mean.item()) == ([1, 3], (x[1] + x[3]).item() / 2)
    for k in (1, 2, 3):
        both(x, None, k)
        both(-x, x / 2, k)
        both(torch.cat([x, -x]) + scale, None, k)


def test_a_mean_that_overflows_is_infinite() -> None:
    """It does not count: the elements are finite, and the method cuts it off."""
    x = torch.tensor([1e308, -1.0, 1.5e308], dtype=torch.float64)
    positions, mean = poison(2, torch.int32), poison(1, torch.float64)
    assert binary_select(x, None, 2, positions, mean) == (2, 0) and mean.item() == math.inf
    for sign in (-1, 1):
        both(x * sign, None, 2)
        both(torch.cat([x, x * float("inf")]) * sign, None, 6)


def test_agrees_with_torch() -> None:
    x = tame(50_000, torch.float64, 3)
    positions, values = poison(500, torch.int32), poison(500, torch.float64)
    assert top_select(x, None, 500, positions, values) == (500, 0)
    assert torch.equal(positions.long(), x.abs().topk(500).indices.sort().values)
    assert torch.equal(values, x[positions.long()])


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_count_nonfinite(dtype: torch.dtype) -> None:
    for count in LENGTHS[::7]:
        compare("count_nonfinite", numbers(count, dtype, count), shift=count)


def _select(x: Tensor, k: int, positions: Tensor, values: Tensor, residual: Tensor | None = None) -> object:
    return top_select(x, residual, k, positions, values)


I32, F32 = torch.int32, torch.float32
X = torch.ones(64)
REFUSED: dict[str, Callable[[], object]] = {
    r"k must be in \[0, 4\]": lambda: _select(torch.ones(4), 5, poison(5, I32), poison(5, F32)),
    r"k must be in \[0, 3\]": lambda: _select(torch.ones(3), -1, poison(0, I32), poison(0, F32)),
    "positions must be a contiguous torch.int32": lambda: _select(
        torch.ones(4), 2, poison(2, torch.int64), poison(2, F32)
    ),
    "positions must be .* of 2 elements": lambda: _select(torch.ones(4), 2, poison(3, I32), poison(2, F32)),
    "values must be a contiguous torch.float64": lambda: _select(
        torch.ones(4).double(), 2, poison(2, I32), poison(2, F32)
    ),
    "residual must be": lambda: _select(torch.ones(4), 2, poison(2, I32), poison(2, F32), torch.ones(3)),
    "positions and grad must not overlap": lambda: _select(X, 64, X.view(I32), poison(64, F32)),
    "positions and residual must not overlap": lambda: _select(torch.ones(64), 4, X.view(I32)[7:11], poison(4, F32), X),
    "values and grad must not overlap": lambda: _select(X, 64, poison(64, I32), X),
    "values and positions must not overlap": lambda: _select(torch.ones(64), 4, X.view(I32)[:4], X[3:7]),
    "mean and grad must not overlap": lambda: binary_select(X, None, 2, poison(2, I32), X[5:6]),
    "grad must be float32": lambda: _select(poison(4, I32), 2, poison(2, I32), poison(2, F32)),
    "mean must be": lambda: binary_select(torch.ones(4), None, 2, poison(2, I32), poison(2, F32)),
    "at most 2147483647": lambda: _select(torch.zeros(1).expand(1 << 31), 2, poison(2, I32), poison(2, F32)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    with pytest.raises(ValueError, match=what):
        REFUSED[what]()
