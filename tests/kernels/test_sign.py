"""One bit per element: every kernel against the reference, bit for bit."""

from __future__ import annotations

from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import single
from horovod_compress import ops
from horovod_compress.ops import reference
from tests.support.marks import each_value, slow

from .support import BATCH_DTYPES, FEW_DTYPES, KEY, LENGTHS, bits, compare, numbers, poison, tame, work

#: Rows that begin inside words, at word borders, that hold one block or several superblocks.
ROWS = (1, 2, 31, 32, 33, 63, 64, 65, 100, 1000, 1024, 1025, 4096)


def _rows(count: int, row_length: int) -> int:
    return -(-count // row_length)


def _residual(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Often exactly the negative of the gradient, so that sums are zero."""
    residual = numbers(count, work(dtype), seed)
    gradient = numbers(count, dtype, seed - 1).to(work(dtype))
    return torch.where(torch.arange(count) % 5 == 0, -gradient, residual)


def _offer(count: int, dtype: torch.dtype, row_length: int, *, shift: int, key=KEY, word_offset: int = 0) -> None:
    grad, residual = numbers(count, dtype, count), _residual(count, dtype, count + 1)
    words, rows = ops.word_count(count), _rows(count, row_length)
    outputs = (poison(words, torch.int64), poison(rows, torch.float64), row_length)
    options = {"shift": shift, "key": key, "word_offset": word_offset}
    compare("sign_offer", grad, residual, *outputs, **options)


@pytest.mark.parametrize("dtype", FEW_DTYPES)
def test_pack(dtype: torch.dtype) -> None:
    for count in LENGTHS:
        compare("sign_pack", numbers(count, dtype, count), poison(ops.word_count(count), torch.int64), shift=count)


def test_pack_defines_zero_and_nan() -> None:
    packed = poison(1, torch.int64)
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, float("nan"), -float("nan"), float("inf"), -float("inf"), 1e-45, -1e-45])
    ops.sign_pack(x, packed)
    assert packed.item() == 0b0101001101


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_offer_every_length(dtype: torch.dtype) -> None:
    for count in LENGTHS:
        _offer(count, dtype, max(count, 1), shift=count)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("key", [None, KEY])
def test_offer_every_row_length(dtype: torch.dtype, key) -> None:
    for row_length in ROWS:
        for count in (row_length - 1, row_length, 3 * row_length + row_length // 2, 2500):
            _offer(count, dtype, row_length, shift=row_length, key=key, word_offset=row_length)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_offer_every_alignment(dtype: torch.dtype) -> None:
    for shift in range(64):
        _offer(777, dtype, 300, shift=shift)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_offer_across_superblocks(dtype: torch.dtype) -> None:
    for count, row_length in ((65537, 65537), (200_001, 200_001), (200_001, 65_600), (150_000, 70_003)):
        _offer(count, dtype, row_length, shift=3)


def _spread(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Finite numbers of very different size: another order of addition rounds differently somewhere."""
    return (torch.exp(1.5 * tame(count, torch.float64, seed)) * tame(count, torch.float64, seed + 1)).to(dtype)


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_sums_are_added_in_the_order_of_the_tree(dtype: torch.dtype) -> None:
    for count, row_length in ((400_004, 400_004), (300_000, 140_003), (40_000, 1500), (5000, 33), (3000, 3000)):
        grad, residual = _spread(count, dtype, count), _spread(count, work(dtype), count + 2)
        words, rows = ops.word_count(count), _rows(count, row_length)
        sums = poison(rows, torch.float64)
        compare("sign_offer", grad, residual, poison(words, torch.int64), sums, row_length, shift=1)
        single.sign_offer(grad, residual, poison(words, torch.int64), sums, row_length)
        exact = (grad.to(work(dtype)) + residual).abs().double()
        assert torch.allclose(sums, torch.stack([row.sum() for row in exact.split(row_length)]), rtol=1e-5)


def test_another_order_of_addition_would_show() -> None:
    """The float64 data of the test above tell trees apart that differ in the size of a superblock only."""
    count = 400_004
    x = _spread(count, torch.float64, count) + _spread(count, torch.float64, count + 2)
    blocks = reference.row_sums(np.abs(x.numpy()), 1024).tolist()

    def total(superblock: int) -> float:
        pieces = [blocks[at : at + superblock] for at in range(0, len(blocks), superblock)]
        return reduce(add, (reduce(add, piece) for piece in pieces))

    assert total(64) not in {total(superblock) for superblock in (1, 32, 128)}


@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("key", [None, KEY])
def test_offer_without_residual_or_sums(dtype: torch.dtype, key) -> None:
    for count in (0, 1, 63, 64, 65, 1000):
        words = poison(ops.word_count(count), torch.int64)
        compare("sign_offer", numbers(count, dtype, count), None, words, None, 10, shift=count, key=key)


def test_offer_counts_what_is_not_finite() -> None:
    grad = torch.ones(100_000)
    grad[[3, 64, 99_999]] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    words = poison(ops.word_count(100_000), torch.int64)
    assert single.sign_offer(grad, None, words, None, 1) == 3


def test_a_sum_that_is_not_a_number_is_always_the_same_one() -> None:
    """Hardware disagrees about the sign and payload of a NaN; sums may travel, so they may not."""
    for payload in (0x7FC00001, 0x7F800001, -1):
        grad = torch.tensor([payload, 0, 0], dtype=torch.int32).view(torch.float32)
        sums = poison(1, torch.float64)
        single.sign_offer(grad, None, poison(1, torch.int64), sums, 3)
        assert sums.view(torch.int64).item() == 0x7FF8000000000000


def test_offer_gives_zeros_a_fair_coin() -> None:
    count = 1 << 20
    words = poison(count // 64, torch.int64)
    single.sign_offer(torch.zeros(count), None, words, None, 1, key=KEY)
    expected = poison(count // 64, torch.int64)
    ops.bernoulli_words(expected, 0, 1, KEY)
    assert not torch.equal(words, expected)
    share = sum((word & (2**64 - 1)).bit_count() for word in words.tolist()) / count
    assert abs(share - 0.5) < 5 * 0.5 / count**0.5
    single.sign_offer(-torch.zeros(count), None, words, None, 1)
    assert bool((words == -1).all())


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("feedback", ["global", "own", "momentum", "none"])
def test_decode_every_length(dtype: torch.dtype, feedback: str) -> None:
    for count in LENGTHS:
        _decode(count, dtype, max(count, 1), feedback, shift=count)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("feedback", ["global", "own", "momentum", "none"])
def test_decode_every_row_length(dtype: torch.dtype, feedback: str) -> None:
    for row_length in ROWS:
        for count in (row_length - 1, row_length, 3 * row_length + row_length // 2, 2500):
            _decode(count, dtype, row_length, feedback, shift=row_length, word_offset=row_length)
            _decode(count, dtype, row_length, feedback, shift=row_length, key=None)


@each_value
@pytest.mark.parametrize("dtype", FEW_DTYPES)
@pytest.mark.parametrize("feedback", ["global", "own", "momentum", "none"])
def test_decode_every_alignment(dtype: torch.dtype, feedback: str) -> None:
    for shift in range(64):
        _decode(777, dtype, 300, feedback, shift=shift)


def _decode(
    count: int, dtype: torch.dtype, row_length: int, feedback: str, *, shift: int, key=KEY, word_offset: int = 0
) -> None:
    grad, residual = numbers(count, dtype, count), _residual(count, dtype, count + 1)
    compare(
        "sign_decode",
        bits(count, count),
        tame(_rows(count, row_length), torch.float32, count),
        row_length,
        grad,
        None if feedback == "none" else residual,
        feedback=feedback,
        decay=0.7,
        scale=0.3,
        key=key,
        word_offset=word_offset,
        shift=shift,
    )


@pytest.mark.parametrize("dtype", BATCH_DTYPES)
def test_decode_without_residual(dtype: torch.dtype) -> None:
    for count in LENGTHS:
        for row_length in (max(count, 1), 7):
            steps = numbers(_rows(count, row_length), torch.float32, count)
            out = poison(count, dtype)
            given = (bits(count, count), steps, row_length, out, None)
            compare("sign_decode", *given, feedback="none", scale=-1.7, shift=count)


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float64, torch.float16, torch.bfloat16)])
def test_decode_without_residual_around_the_cache(dtype: torch.dtype) -> None:
    """Outputs of many megabytes take another store instruction."""
    count = (16 << 20) // torch.finfo(dtype).bits * 8 + 5
    for row_length in (count, 100_003):
        steps = tame(_rows(count, row_length), torch.float32, 1)
        for shift in (0, 1, 5):
            given = (bits(count, 2), steps, row_length, poison(count, dtype), None)
            compare("sign_decode", *given, feedback="none", shift=shift)


def test_own_feedback_remembers_the_bits_that_were_offered() -> None:
    """Decoding the own bits with "global" feedback is what "own" means, but for the bound of what is kept."""
    count, row_length = 5000, 321
    grad, residual = numbers(count, torch.float32, 1), _residual(count, torch.float32, 2)
    offered = poison(ops.word_count(count), torch.int64)
    single.sign_offer(grad, residual, offered, None, row_length, key=KEY, word_offset=9)
    steps = tame(_rows(count, row_length), torch.float32, 3)
    kept = []
    for consensus, feedback in ((offered, "global"), (bits(count, 4), "own")):
        left = residual.clone()
        single.sign_decode(consensus, steps, row_length, grad.clone(), left, feedback=feedback, key=KEY, word_offset=9)
        kept.append(left)
    assert torch.equal(kept[0].nan_to_num(7.0), kept[1].nan_to_num(7.0).clamp(-(2.0**95), 2.0**95))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_than_two_to_the_31_elements() -> None:
    """Positions that no 32-bit integer holds: the last elements must arrive where they belong.

    Takes 5 GB of memory.
    """
    count = (1 << 31) + 77
    x = torch.ones(count, dtype=torch.float16)
    marked = torch.tensor([0, 64, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, count - 1])
    x[marked] = -1
    words = poison(ops.word_count(count), torch.int64)
    sums = poison(2, torch.float64)
    assert single.sign_offer(x, None, words, sums, 1 << 31, key=KEY) == 0
    assert sums.tolist() == [float(1 << 31), 77.0]
    packed = poison(words.numel(), torch.int64)
    ops.sign_pack(x, packed)
    assert torch.equal(words, packed)
    expected = torch.full_like(words, -1)
    expected[-1] = (1 << count % 64) - 1
    for position in marked.tolist():
        expected[position // 64] ^= 1 << position % 64
    assert torch.equal(words, expected)
    single.sign_decode(words, torch.tensor([1.0, 2.0]), 1 << 31, x, None, feedback="none")
    single.sign_offer(x, None, packed, sums, 1 << 31, key=KEY)
    assert torch.equal(packed, expected)
    assert sums.tolist() == [float(1 << 31), 154.0]
