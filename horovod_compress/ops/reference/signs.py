"""Signs, one bit for each element, and what becomes of bits alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..keys import Key
from .numbers import (
    ALL_ONES,
    left_over,
    load,
    offered,
    quiet,
    random_words,
    row_sums,
    store,
    too_large,
    unpacked,
    write_bits,
)


def _own_bits(x: np.ndarray, key: Key | None, word_offset: int) -> np.ndarray:
    if key is None:
        return np.asarray(x >= 0)
    words = random_words(key, word_offset, -(-x.size // 64))
    bits: np.ndarray = (x > 0) | ((x == 0) & unpacked(words, x.size))
    return bits


def sign_pack(x: Tensor, bits: Tensor) -> None:
    write_bits(bits, load(x) >= 0)


@quiet
def sign_offer(
    grad: Tensor,
    residual: Tensor | None,
    bits: Tensor,
    sums: Tensor | None,
    row_length: int,
    *,
    key: Key | None = None,
    word_offset: int = 0,
    steps: Tensor | None = None,
    ranks: int = 1,
    divisor: Tensor | None = None,
) -> int:
    x = offered(grad, residual, divisor)
    write_bits(bits, _own_bits(x, key, word_offset))
    found = row_sums(np.abs(x), row_length)
    if sums is not None:
        sums.numpy()[:] = found
    if steps is not None:
        sizes = np.minimum(row_length, x.size - np.arange(found.size) * row_length)
        steps.numpy()[:] = found / (sizes * ranks)
    return too_large(x)


@quiet
def sign_decode(
    bits: Tensor,
    steps: Tensor,
    row_length: int,
    grad: Tensor,
    residual: Tensor | None,
    *,
    feedback: str,
    decay: float = 1.0,
    scale: float = 1.0,
    key: Key | None = None,
    word_offset: int = 0,
    zeros: Tensor | None = None,
    divisor: Tensor | None = None,
) -> None:
    x = offered(grad, residual, divisor)
    step = np.repeat(steps.numpy(), row_length)[: x.size].astype(x.dtype)
    decoded = np.where(unpacked(bits, x.size), step, -step)
    if zeros is not None:
        decoded[unpacked(zeros, x.size)] = 0
    if residual is not None:
        own = np.where(_own_bits(x, key, word_offset), step, -step)
        left = {"global": left_over(x - decoded), "own": x - own, "momentum": x}[feedback]
        residual.numpy()[:] = left * x.dtype.type(decay)
    result = decoded * x.dtype.type(scale)
    store(grad, result if divisor is None else result * divisor.numpy())


@quiet
def two_value_offer(
    grad: Tensor, residual: Tensor | None, bits: Tensor, highs: Tensor, lows: Tensor, ones: Tensor, row_length: int
) -> int:
    x = offered(grad, residual)
    high, none = x >= 0, x.dtype.type(0)
    write_bits(bits, high)
    highs.numpy()[:] = row_sums(np.where(high, np.abs(x), none), row_length)
    lows.numpy()[:] = row_sums(np.where(high, none, np.abs(x)), row_length)
    starts = range(0, x.size, row_length)
    ones.numpy()[:] = [np.count_nonzero(high[start : start + row_length]) for start in starts]
    return too_large(x)


@quiet
def two_value_decode(
    bits: Sequence[Tensor],
    highs: Sequence[Tensor],
    lows: Sequence[Tensor] | None,
    row_length: int,
    own: int,
    grad: Tensor,
    residual: Tensor,
    *,
    scale: float = 1.0,
    first_word: int = 0,
    first_row: int = 0,
) -> None:
    x = offered(grad, residual)

    def spread(values: Tensor) -> np.ndarray:
        return np.asarray(np.repeat(values.numpy()[first_row:], row_length)[: x.size].astype(x.dtype))

    sent = []
    for rank, high in enumerate(map(spread, highs)):
        sent.append(
            np.where(unpacked(bits[rank][first_word:], x.size), high, -high if lows is None else spread(lows[rank]))
        )
    total = sent[0].copy()
    for values in sent[1:]:
        total += values
    residual.numpy()[:] = x - sent[own]
    store(grad, total * x.dtype.type(scale))


# ---- bits alone -------------------------------------------------------------------------------


def probability_digits(numerator: int, denominator: int) -> list[int]:
    """Return the binary digits of a probability below 1, at most 64, without trailing zeros."""
    digits: list[int] = []
    while numerator and len(digits) < 64:
        numerator *= 2
        digits.append(numerator // denominator)
        numerator %= denominator
    return digits


def bernoulli(key: Key, first: int, count: int, numerator: int, denominator: int) -> np.ndarray:
    """Compare a uniform random number with the probability, digit by digit, in every lane."""
    if numerator == denominator:
        return np.full(count, ALL_ONES, dtype=np.uint64)
    undecided = np.full(count, ALL_ONES, dtype=np.uint64)
    out = np.zeros(count, dtype=np.uint64)
    for index, digit in enumerate(probability_digits(numerator, denominator)):
        if not undecided.any():
            break
        random = random_words(key, first, count, index)
        if digit:
            out |= undecided & ~random
            undecided &= random
        else:
            undecided &= ~random
    return out


def bernoulli_words(out: Tensor, numerator: int, denominator: int, key: Key, *, word_offset: int = 0) -> None:
    words = bernoulli(key, word_offset, out.numel(), numerator, denominator)
    out.numpy()[:] = words.view(np.int64)


def merge_bits(
    into: Tensor,
    other: Tensor,
    weight_into: int,
    weight_other: int,
    key: Key,
    *,
    word_offset: int = 0,
) -> None:
    total = weight_into + weight_other
    take = bernoulli(key, word_offset, into.numel(), weight_other, total).view(np.int64)
    into.numpy()[:] = (take & other.numpy()) | (~take & into.numpy())


def majority_fold(parts: Sequence[Tensor], out: Tensor, count: int) -> None:
    ones = sum(unpacked(part, count).astype(np.int64) for part in parts)
    write_bits(out, np.asarray(2 * ones >= len(parts)))
