"""Signs with two values per row: both kernels against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from tests.support.marks import each_value

from .support import BATCH_DTYPES, FEW_DTYPES, LENGTHS, bits, compare, numbers, poison, tame, work

ROWS = (1, 2, 31, 33, 64, 100, 1000, 1025, 4096)


def _rows(count: int, row_length: int) -> int:
    return -(-count // row_length)


def _offer(count: int, dtype: torch.dtype, row_length: int, *, shift: int, residual: bool = True) -> None:
    grad, left = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)
    left[::5] = -grad[::5].to(work(dtype))  # sums that are zero
    rows = _rows(count, row_length)
    outputs = [poison(rows, kind) for kind in (torch.float64, torch.float64, torch.int64)]
    words = poison(ops.word_count(count), torch.int64)
    compare("two_value_offer", grad, left if residual else None, words, *outputs, row_length, shift=shift)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_offer(dtype: torch.dtype) -> None:
    for count in LENGTHS[::3]:
        _offer(count, dtype, max(count, 1), shift=count)
    for row_length in ROWS:
        for count in (row_length - 1, row_length, 3 * row_length + row_length // 2, 2500):
            _offer(count, dtype, row_length, shift=row_length, residual=bool(count % 2))


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_offer_across_superblocks(dtype: torch.dtype) -> None:
    for count, row_length in ((65_537, 65_537), (200_001, 200_001), (150_000, 70_003)):
        _offer(count, dtype, row_length, shift=3)


def test_offer_agrees_with_sign_offer() -> None:
    """The bits are the same, and the two sides are all there is."""
    count, row_length = 100_000, 333
    grad, residual, rows = tame(count, torch.float32, 1), tame(count, torch.float32, 2), _rows(100_000, 333)
    words, more = (poison(ops.word_count(count), torch.int64) for _ in range(2))
    highs, lows, sums = (poison(rows, torch.float64) for _ in range(3))
    ones = poison(rows, torch.int64)
    single.two_value_offer(grad, residual, words, highs, lows, ones, row_length)
    single.sign_offer(grad, residual, more, sums, row_length)
    assert torch.equal(words, more)
    assert torch.allclose(highs + lows, sums, rtol=1e-6)
    x = grad + residual
    assert ones.tolist() == [int((row >= 0).sum()) for row in x.split(row_length)]
    exact = torch.stack([row.double().clamp(min=0).sum() for row in x.split(row_length)])
    assert torch.allclose(highs, exact, rtol=1e-6)


def test_offer_counts_what_is_not_finite() -> None:
    grad = torch.ones(100_000)
    grad[[3, 64, 99_999]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    sums, words = [poison(1, torch.float64) for _ in range(2)], poison(ops.word_count(100_000), torch.int64)
    assert single.two_value_offer(grad, None, words, *sums, poison(1, torch.int64), 100_000) == 3


def _decode(
    count: int, dtype: torch.dtype, row_length: int, ranks: int, own: int, *, shift: int, two: bool = True
) -> None:
    rows = _rows(count, row_length)
    grad, residual = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)

    def values(seed: int) -> list[Tensor]:
        return [tame(rows, torch.float32, seed + rank) for rank in range(ranks)]

    sent = [bits(count, count + rank) for rank in range(ranks)]
    given = (sent, values(1), values(100) if two else None, row_length, own)
    compare("two_value_decode", *given, grad, residual, scale=0.3, shift=shift)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("two", [False, True])
def test_decode(dtype: torch.dtype, two: bool) -> None:
    for count in LENGTHS[::3]:
        _decode(count, dtype, max(count, 1), 3, count % 3, shift=count, two=two)
    for row_length in ROWS:
        for count in (row_length - 1, row_length, 3 * row_length + row_length // 2, 2500):
            _decode(count, dtype, row_length, 2, 1, shift=row_length, two=two)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 9])
def test_decode_of_any_number_of_ranks(dtype: torch.dtype, ranks: int) -> None:
    for own in range(ranks):
        _decode(70_001, dtype, 70_001, ranks, own, shift=own)
        _decode(777, dtype, 300, ranks, own, shift=own, two=False)


def test_ranks_are_added_in_their_order() -> None:
    """Another order rounds differently."""
    found = []
    for order in ([0, 1, 2], [2, 1, 0]):
        highs = [torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-24)]
        grad, residual = torch.zeros(1), torch.zeros(1)
        one = torch.ones(1, dtype=torch.int64)
        single.two_value_decode([one] * 3, [highs[rank] for rank in order], None, 1, 0, grad, residual)
        found.append(grad.item())
    assert found == [1.0, 1.0 + 2.0**-23]


def test_threads_change_nothing(few_threads: None) -> None:
    count, before = 3_000_001, torch.get_num_threads()
    grad, residual = tame(count, torch.float32, 1), tame(count, torch.float32, 2)
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        rows = _rows(count, 70_001)
        made = [poison(ops.word_count(count), torch.int64), *(poison(rows, torch.float64) for _ in range(2))]
        made.append(poison(rows, torch.int64))
        single.two_value_offer(grad, residual, *made, 70_001)
        mine, left = grad.clone(), residual.clone()
        single.two_value_decode([made[0]] * 2, [made[1].float()] * 2, None, 70_001, 0, mine, left, scale=0.5)
        found.append([*made, mine, left])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _f(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(count, dtype=dtype)


def _w(count: int) -> Tensor:
    return _f(count, torch.int64)


MEMORY = _f(200)
REFUSED = {
    "highs must be": lambda: single.two_value_offer(_f(64), None, _w(1), _f(1), _f(1, torch.float64), _w(1), 64),
    "ones must be": lambda: single.two_value_offer(
        _f(64), None, _w(1), _f(1, torch.float64), _f(1, torch.float64), _w(2), 64
    ),
    "residual must be": lambda: single.two_value_decode([_w(1)], [_f(1)], None, 64, 0, _f(64), _f(63)),
    "among them": lambda: single.two_value_decode([_w(1)], [_f(1)], None, 64, 1, _f(64), _f(64)),
    "bits must hold": lambda: single.two_value_decode([], [], None, 64, 0, _f(64), _f(64)),
    "highs and lows": lambda: single.two_value_decode([_w(1)], [_f(1)], [], 64, 0, _f(64), _f(64)),
    r"lows\[0\] must be": lambda: single.two_value_decode([_w(1)], [_f(1)], [_f(2)], 64, 0, _f(64), _f(64)),
    "overlap": lambda: single.two_value_decode([_w(1)], [_f(1)], None, 64, 0, MEMORY[:64], MEMORY[50:114]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()
