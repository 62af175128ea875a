"""Residuals of 16 bits: every kernel that takes them against the reference and CUDA's text, and the law of rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops.keys import KEPT, Key
from tests.support.marks import each_value

from . import emulator
from .parity import Target
from .support import BATCH_DTYPES, FEW_DTYPES, KEY, LENGTHS, bits, compare, numbers, poison, tame, work

ROUNDING = KEY.at(purpose=KEPT)
LONG = (65_537, 150_001)
ROWS = (1, 31, 100, 1025)


def _short(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Often exactly the negative of the gradient, where it has as few bits."""
    gradient = numbers(count, dtype, seed - 1).to(torch.bfloat16)
    return torch.where(torch.arange(count) % 5 == 0, -gradient, numbers(count, torch.bfloat16, seed))


def _rows(count: int, row_length: int) -> int:
    return -(-count // row_length)


def signs(same: Any, count: int, dtype: torch.dtype, row_length: int, feedback: str, **options: Any) -> None:
    """Compare an offer and a decoding, with something to divide by where the length is odd."""
    grad, residual = numbers(count, dtype, count), _short(count, dtype, count + 1)
    steps, divisor = tame(_rows(count, row_length), torch.float32, 3), tame(count, work(dtype), 4).abs() + 0.1
    more = {"divisor": divisor} if count % 2 else {}
    outputs = (poison(ops.word_count(count), torch.int64), poison(_rows(count, row_length), torch.float64), row_length)
    same("sign_offer", grad, residual, *outputs, key=KEY, word_offset=3, **more, **options)
    rule = {"feedback": feedback, "decay": 0.7, "scale": 0.3, "key": KEY, "rounding": ROUNDING, "word_offset": 3}
    same("sign_decode", bits(count, 2), steps, row_length, grad, residual, **rule, **more, **options)


def two_values(same: Any, count: int, dtype: torch.dtype, row_length: int, **options: Any) -> None:
    grad, residual, rows = numbers(count, dtype, count), _short(count, dtype, count + 1), _rows(count, row_length)
    made = [poison(rows, kind) for kind in (torch.float64, torch.float64, torch.int64)]
    same("two_value_offer", grad, residual, poison(ops.word_count(count), torch.int64), *made, row_length, **options)
    sent = [bits(64 * (ops.word_count(count) + 2), rank) for rank in range(3)]
    highs, lows = ([tame(rows, torch.float32, seed + rank) for rank in range(3)] for seed in (1, 100))
    rule = {"scale": 0.3, "rounding": ROUNDING, "first_word": 2}
    same("two_value_decode", sent, highs, lows, row_length, 1, grad, residual, **rule, **options)


def plain(same: Any, count: int, dtype: torch.dtype, **options: Any) -> None:
    grad, residual = numbers(count, dtype, count), _short(count, dtype, count + 1)
    for out in (work(dtype), torch.bfloat16):
        same("dense_offer", grad, residual, poison(count, out), **options)
        same("dense_decode", numbers(count, out, 3), grad, scale=0.3, residual=residual, **options)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_kernels_give_the_bits_of_their_references(dtype: torch.dtype) -> None:
    feedbacks = ("global", "own", "momentum")
    for count in (*LENGTHS[::6], *LONG):
        signs(compare, count, dtype, max(count, 1), feedbacks[count % 3], shift=count)
        two_values(compare, count, dtype, max(count, 1), shift=count)
        plain(compare, count, dtype, shift=count)
    for row_length in ROWS:
        for count in (row_length - 1, 3 * row_length + row_length // 2, 2500):
            signs(compare, count, dtype, row_length, feedbacks[row_length % 3], shift=row_length)
            two_values(compare, count, dtype, row_length, shift=row_length)


@pytest.mark.skipif(not emulator.compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_cuda_gives_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    same = Target("emulated", "cpu").same
    for count in (0, 1, 33, 64, 257, 1025, 4097, 70_001):
        for row_length in (max(count, 1), 100):
            signs(same, count, dtype, row_length, ("global", "own")[count % 2])
            two_values(same, count, dtype, row_length)
        plain(same, count, dtype)


# ---- the law ------------------------------------------------------------------------------------


def _kept(x: Tensor, key: Key, first_word: int = 0) -> Tensor:
    """Return what is kept of x, all of it."""
    residual, grad = torch.full((x.numel(),), -0.0, dtype=torch.bfloat16), x.clone()
    given = (bits(x.numel(), 1), torch.ones(1), max(1, x.numel()), grad, residual)
    single.sign_decode(*given, feedback="momentum", rounding=key, word_offset=first_word)
    return residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_kept_is_right_on_average(dtype: torch.dtype) -> None:
    """Within 5 standard errors, and by less than a unit each time; each element on its own."""
    count, keys = 500, 4000
    x = tame(count, dtype, 1) * torch.logspace(-20, 20, count, dtype=dtype)
    found = torch.stack([_kept(x, ROUNDING.at(step=step)).double() for step in range(keys)])
    unit = 2.0 ** (x.double().abs().log2().floor() - 7)
    part = (x.double().abs() / unit) % 1
    error = unit * (part * (1 - part) / keys).sqrt()
    assert bool(((found - x).abs() < unit).all())
    assert bool(((found.mean(0) - x).abs() <= 5 * error + unit * 1e-4).all())
    nearest = x.to(torch.bfloat16).double()
    assert bool(((nearest - x).abs() > 5 * error + unit * 1e-4).any()), "the control: to the nearest is not right"


def test_what_fits_is_kept_exactly() -> None:
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    x = x[x.isfinite()]
    assert torch.equal(_kept(x, ROUNDING).view(torch.int16), x.to(torch.bfloat16).view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_rounded_up_to_what_the_next_step_would_drop(dtype: torch.dtype) -> None:
    near = torch.tensor([1 - 2.0**-24, 1 - 2.0**-9, 1 - 2.0**-40], dtype=dtype)
    x = (2.0**96 * near)[: 2 if dtype is torch.float32 else 3]
    kept = torch.stack([_kept(torch.cat([x, -x]), ROUNDING.at(step=step)) for step in range(50)])
    assert bool((kept.abs() < 2.0**96).all()) and bool((kept.abs() > 2.0**95).all())


def test_what_is_not_finite_stays_so() -> None:
    x = torch.tensor([0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    found = _kept(torch.cat([x, -x]), ROUNDING)
    assert found[[0, 4]].tolist() == [float("inf"), -float("inf")] and bool(found[[1, 2, 3, 5, 6, 7]].isnan().all())


def test_draws_are_of_the_place_in_the_bucket() -> None:
    """A part of a tensor is kept as it would be within the whole; other places and other steps have other draws."""
    x = tame(6400, torch.float32, 5)
    whole = _kept(x, ROUNDING)
    assert torch.equal(whole[640:], _kept(x[640:], ROUNDING, first_word=10))
    same = torch.full((6400,), 1.00390625)  # between two neighbours
    one, other = (_kept(same, ROUNDING.at(step=step)) for step in (1, 2))
    assert 0.4 < float((one != other).float().mean()) < 0.6


def test_draws_of_two_elements_are_independent() -> None:
    """Over 4,000 steps: up and up in a quarter of them, within 5 standard errors, whatever the distance."""
    steps, same = 4000, torch.full((5000,), 1.00390625)
    ups = torch.stack([_kept(same, ROUNDING.at(step=step)) > 1 for step in range(steps)]).double()
    for distance in (1, 2, 3, 8, 64, 1024, 4096):
        both = (ups[:, 7] * ups[:, 7 + distance]).mean()
        assert abs(float(both) - 0.25) < 5 * (3 / 16 / steps) ** 0.5


def test_draws_are_spread_evenly() -> None:
    """Over elements of one step: of 16 equal parts of a unit each is as likely, by chi-square with 15 degrees."""
    count = 1 << 16
    below = torch.arange(16) / 16  # how much of a unit is cut off
    ups = [
        float((_kept(torch.full((count,), 1 + float(part) * 2.0**-7), ROUNDING) > 1).float().mean()) for part in below
    ]
    found = torch.tensor(ups).diff() * count
    assert float(((found - count / 16) ** 2 / (count / 16)).sum()) < 40


# ---- what is refused ----------------------------------------------------------------------------


@each_value
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["sign_decode", "two_value_decode"])
def test_a_key_goes_with_sixteen_bits(name: str, kind: torch.dtype) -> None:
    grad, residual = torch.ones(9), torch.zeros(9, dtype=kind)
    rounding = None if kind is torch.bfloat16 else ROUNDING
    with pytest.raises(ValueError, match="rounding must be a key for residuals of bfloat16"):
        if name == "sign_decode":
            given = (bits(9, 1), torch.ones(1), 9, grad, residual)
            single.sign_decode(*given, feedback="own", rounding=rounding)
        else:
            single.two_value_decode([bits(9, 1)], [torch.ones(1)], None, 9, 0, grad, residual, rounding=rounding)
    assert grad.tolist() == [1.0] * 9


def test_other_dtypes_of_sixteen_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"residual must be a contiguous torch\.float32"):
        single.dense_offer(torch.ones(9), torch.zeros(9, dtype=torch.float16), torch.ones(9))
