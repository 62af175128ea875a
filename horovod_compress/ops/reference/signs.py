"""Signs, one bit for each element: with values for rows, merged, folded, and in records."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ..keys import Key
from .numbers import (
    ALL_ONES,
    keep,
    lane_sums,
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
    scale: float = 1.0,
    divisor: Tensor | None = None,
) -> int:
    x = offered(grad, residual, divisor)
    write_bits(bits, _own_bits(x, key, word_offset))
    found = row_sums(np.abs(x), row_length)
    if sums is not None:
        sums.numpy()[:] = found
    if steps is not None:
        sizes = np.minimum(row_length, x.size - np.arange(found.size) * row_length)
        steps.numpy()[:] = (found / (sizes * ranks)).astype(np.float32) * np.float32(scale)
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
    rounding: Key | None = None,
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
        keep(residual, left * x.dtype.type(decay), rounding, 64 * word_offset)
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
    rounding: Key | None = None,
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
    keep(residual, x - sent[own], rounding, 64 * first_word)
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


# ---- what merging rounds off -------------------------------------------------------------------


def rounded_off(rows: Sequence[Tensor], ranks: int) -> np.ndarray:
    """Return E of every element: an even number from -ranks to ranks - 1."""
    count, middle = 64 * rows[0].numel() if rows else 0, ranks // 2
    stored = sum(unpacked(row, count).astype(np.int64) << place for place, row in enumerate(rows))
    return np.asarray(2 * ((stored ^ middle) - middle))


def _keep(rows: Sequence[Tensor], ranks: int, rest: np.ndarray) -> None:
    middle = ranks // 2
    stored = (rest // 2 + middle) ^ middle
    for place, row in enumerate(rows[: (ranks - 1).bit_length()]):
        write_bits(row, (stored >> place & 1).astype(bool))


def _signs(bits: Tensor) -> np.ndarray:
    return np.where(unpacked(bits, 64 * bits.numel()), 1, -1)


def _round(y: np.ndarray, out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor], ranks: int) -> None:
    """Round ``y``, and what was rounded off before, to a sign for that many ranks."""
    needed = (ranks - 1).bit_length()
    if needed:
        y = y + rounded_off(before[:needed], ranks)
    sign = np.where(y >= 0, 1, -1)
    write_bits(out, sign > 0)
    _keep(after, ranks, y - ranks * sign)


def shaped_merge(into: Tensor, other: Tensor, before: Sequence[Tensor], after: Sequence[Tensor], ranks: int) -> None:
    _round((ranks - 1) * _signs(other) + _signs(into), into, before, after, ranks)


def shaped_fold(parts: Sequence[Tensor], out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    total = np.sum([_signs(part) for part in parts], axis=0)
    _round(total, out, before, after, len(parts))


# ---- three values ------------------------------------------------------------------------------

_WEIGHTS = 3 ** np.arange(5).reshape(5, 1)


def _steps_and_states(ranks: int) -> tuple[int, int]:
    """Return how far apart the values are that can be kept, and how many there are; their middle is 0."""
    return (1, ranks) if ranks % 2 else (2, ranks // 2 + (ranks % 4 == 0))


def ternary_left_over(rows: Sequence[Tensor], ranks: int, count: int) -> np.ndarray:
    """Return E of every element: from -(ranks // 2) to ranks // 2."""
    step, states = _steps_and_states(ranks)
    stored = np.zeros(count, dtype=np.int64)
    for place, row in enumerate(rows[: (states - 1).bit_length()]):
        stored |= unpacked(row, count).astype(np.int64) << place
    return np.asarray(step * (2 * (stored ^ states // 2) - (states - 1)) // 2)


def _keep_ternary(rows: Sequence[Tensor], ranks: int, rest: np.ndarray) -> None:
    step, states = _steps_and_states(ranks)
    stored = (2 * rest // step + states - 1) // 2 ^ states // 2
    for place, row in enumerate(rows[: (states - 1).bit_length()]):
        write_bits(row, (stored >> place & 1).astype(bool))


def ternary_fold(parts: Sequence[Tensor], out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    ranks, count = len(parts), 64 * parts[0].numel()
    y = np.sum([_signs(part) for part in parts], axis=0) + ternary_left_over(before, ranks, count)
    t = np.where(2 * np.abs(y) >= ranks, np.sign(y), 0)
    _keep_ternary(after, ranks, y - ranks * t)
    digits = (t + 1).reshape(-1, 5, 64)  # of group, word and lane
    out.numpy().view(np.uint8)[:] = (digits * _WEIGHTS).sum(axis=1).astype(np.uint8).reshape(-1)


def ternary_unpack(packed: Tensor, bits: Tensor, zeros: Tensor) -> None:
    left = packed.numpy().view(np.uint8).astype(np.int64).reshape(-1, 64)
    digits = np.zeros((left.shape[0], 5, 64), dtype=np.int64)
    for place in reversed(range(5)):
        digits[:, place] = np.minimum(left // 3**place, 2)
        left -= digits[:, place] * 3**place
    write_bits(bits, (digits >= 1).reshape(-1))
    write_bits(zeros, (digits == 1).reshape(-1))


# ---- records ------------------------------------------------------------------------------------

_SCALE_BYTES, _LARGEST = 4, float(np.finfo(np.float32).max)


def _scale(x: np.ndarray, rule: str) -> float:
    """Return the scale of a block."""
    sizes = np.abs(x).astype(np.float64)
    mean = lane_sums(sizes * sizes if rule == "l2" else sizes) / x.size
    return float(np.sqrt(mean) if rule == "l2" else mean)


def _write(record: np.ndarray, x: np.ndarray, scale: float) -> np.float32:
    """Write the record of a block and return its scale as float32."""
    kept = np.float32(scale if scale <= _LARGEST else _LARGEST)  # noqa: FURB136  min() would keep a NaN
    record[:_SCALE_BYTES] = np.frombuffer(kept.tobytes(), dtype=np.uint8)
    record[_SCALE_BYTES:] = 0
    bits = np.packbits(x >= 0, bitorder="little")
    record[_SCALE_BYTES : _SCALE_BYTES + bits.size] = bits
    return kept


def _read(record: np.ndarray, count: int) -> tuple[np.float32, np.ndarray]:
    """Return the scale of a record, and the bits of its elements."""
    scale = np.frombuffer(record[:_SCALE_BYTES].tobytes(), dtype=np.float32)[0]
    return scale, np.unpackbits(record[_SCALE_BYTES:], bitorder="little")[:count].astype(bool)


def _blocks(count: int, block: int) -> list[slice]:
    return [slice(first, min(first + block, count)) for first in range(0, count, block)]


def _of(records: Tensor, block: int) -> np.ndarray:
    return np.asarray(records.numpy().reshape(-1, _SCALE_BYTES + block // 8))


@quiet
def record_offer(grad: Tensor, residual: Tensor | None, records: Tensor, block: int, *, rule: str) -> int:
    x = offered(grad, residual)
    for record, own in zip(_of(records, block), _blocks(x.size, block), strict=True):
        _write(record, x[own], _scale(x[own], rule))
    return too_large(x)


@quiet
def record_fold(parts: Sequence[Tensor], kept: Tensor, left: Tensor, out: Tensor, block: int, *, rule: str) -> None:
    all_parts = [_of(part, block) for part in parts]
    before, after = kept.numpy(), left.numpy()
    for index, own in enumerate(_blocks(before.size, block)):
        total, scales = None, 0.0
        for part in all_parts:
            scale, bits = _read(part[index], own.stop - own.start)
            scales += float(scale)
            share = before.dtype.type(np.float64(scale) / len(parts))
            sent = np.where(bits, share, -share)
            total = sent if total is None else total + sent
        assert total is not None
        total = total + before[own]
        whole = scales / len(parts) if rule == "shared" else _scale(total, rule)
        step = before.dtype.type(_write(_of(out, block)[index], total, whole))
        rest = total - np.where(total >= 0, step, -step)
        after[own] = np.where(np.isfinite(rest), rest, before.dtype.type(0))


@quiet
def record_decode(
    records: Tensor, scales: Tensor, grad: Tensor, residual: Tensor, block: int, *, scale: float = 1.0
) -> None:
    x = offered(grad, residual)
    found = np.empty_like(x)
    for index, own in enumerate(_blocks(x.size, block)):
        step, bits = _read(_of(records, block)[index], own.stop - own.start)
        value, mine = x.dtype.type(step) * x.dtype.type(scale), x.dtype.type(scales.numpy()[index])
        found[own] = np.where(bits, value, -value)
        x[own] -= np.where(x[own] >= 0, mine, -mine)
    residual.numpy()[:] = x
    store(grad, found)
