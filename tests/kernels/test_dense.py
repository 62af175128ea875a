"""Plain numbers: offer, add and decode against the reference, bit for bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from benchmarks import single
from tests.support.marks import slow

from .support import DTYPES, LENGTHS, compare, differences, numbers, poison, work

#: `make test` takes each of them with the next one, and the usual one with itself.
QUICK = [(DTYPES[0], DTYPES[0]), *((dtype, DTYPES[(i + 1) % 4]) for i, dtype in enumerate(DTYPES))]
PAIRS = [*QUICK, *slow(*(pair for pair in product(DTYPES, DTYPES) if pair not in QUICK))]


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
def test_offer(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for count in LENGTHS[::2] if dtype is not out_dtype else LENGTHS:
        grad, residual = numbers(count, dtype, count), numbers(count, work(dtype), count + 1)
        compare("dense_offer", grad, residual, poison(count, out_dtype), shift=count)
        compare("dense_offer", grad, None, poison(count, out_dtype), shift=count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add(dtype: torch.dtype) -> None:
    for count in LENGTHS:
        compare("dense_add", numbers(count, dtype, count), numbers(count, dtype, count + 1), shift=count)


@pytest.mark.parametrize(("dtype", "out_dtype"), PAIRS)
def test_decode(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    for count in LENGTHS[::2] if dtype is not out_dtype else LENGTHS:
        payload, residual = numbers(count, dtype, count), numbers(count, work(out_dtype), count + 1)
        compare("dense_decode", payload, poison(count, out_dtype), scale=1 / 3, residual=residual, shift=count)
        compare("dense_decode", payload, poison(count, out_dtype), scale=0.25, shift=count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_alignment(dtype: torch.dtype) -> None:
    for shift in range(64):
        grad, residual = numbers(333, dtype, 1), numbers(333, work(dtype), 2)
        compare("dense_offer", grad, residual, poison(333, dtype), shift=shift)
        compare("dense_add", grad, numbers(333, dtype, 3), shift=shift)
        compare("dense_decode", grad, poison(333, dtype), scale=3.0, residual=residual, shift=shift)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float64, torch.float16, torch.bfloat16)])
def test_around_the_cache(dtype: torch.dtype) -> None:
    """Outputs of many megabytes take another store instruction."""
    count = (9 << 20) * 8 // torch.finfo(dtype).bits + 3
    grad, residual = numbers(count, dtype, 1), numbers(count, work(dtype), 2)
    compare("dense_offer", grad, residual, poison(count, dtype), shift=1)
    compare("dense_decode", grad, poison(count, dtype), scale=0.7, residual=residual, shift=3)


def test_every_float16_and_bfloat16_survives_a_round_trip() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)
        wide, back = poison(1 << 16, torch.float32), poison(1 << 16, dtype)
        single.dense_offer(every, None, wide)
        assert differences(wide, every.float()) == 0
        single.dense_offer(wide, None, back)
        assert differences(back, every) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
def test_rounding_at_every_midpoint(dtype: torch.dtype, wide: torch.dtype) -> None:
    """Halfway between neighbours, and one unit to either side of it, for every pair of neighbours."""
    positive = torch.arange(1 << 15, dtype=torch.int32).to(torch.uint16).view(dtype)
    finite = positive[positive.isfinite()].to(torch.float64)
    halfway = ((finite[1:] + finite[:-1]) / 2).to(wide)
    infinity = torch.tensor(float("inf"), dtype=wide)
    values = torch.cat([halfway, halfway.nextafter(infinity), halfway.nextafter(-infinity)])
    values = torch.cat([values, -values])
    rounded = poison(values.numel(), dtype)
    single.dense_offer(values, None, rounded)
    even = (finite.to(dtype).view(torch.int16) & 1) == 0
    nearest = torch.where(even[:-1], finite[:-1], finite[1:])
    expected = torch.cat([nearest, finite[1:], finite[:-1]])
    assert torch.equal(rounded.double(), torch.cat([expected, -expected]))


def test_overflow_is_counted_where_it_happens() -> None:
    """The largest float32 that still rounds to a finite value, and the next one."""
    for dtype, bound in ((torch.float16, 65520.0), (torch.bfloat16, float.fromhex("0x1.ffp127"))):
        at = torch.tensor([bound, -bound] * 20)
        below = at.nextafter(torch.zeros(40))
        out = poison(40, dtype)
        assert single.dense_offer(at, None, out) == 40
        assert bool(out.isinf().all())
        assert single.dense_offer(below, None, out) == 0
        assert bool(out.isfinite().all())
    bound = torch.tensor(float.fromhex("0x1.ffffffp127"), dtype=torch.float64)
    out = poison(2, torch.float32)
    largest = torch.stack([bound, bound.nextafter(torch.zeros_like(bound))])
    assert single.dense_offer(largest, None, out) == 1
    assert out.isinf().tolist() == [True, False]


def test_a_caller_that_flushes_subnormals_changes_nothing() -> None:
    x = torch.full((1000,), 1e-40)
    flushed, kept = poison(1000, torch.float32), poison(1000, torch.float32)
    single.dense_offer(x, x, kept)
    assert torch.set_flush_denormal(True)
    try:
        single.dense_offer(x, x, flushed)
        mode_survived = float(torch.full((1,), 1e-40) * 1.0) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert differences(flushed, kept) == 0
    assert float(kept[0]) > 0
    assert mode_survived
