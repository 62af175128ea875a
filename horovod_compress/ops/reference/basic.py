"""Every kernel again, in slow and readable NumPy: what the compiled ones must equal bit for bit.

``HVC_KERNELS=reference`` runs everything on these. They take the same tensors as the public
functions, whose legality checks have already passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..keys import Key

P = ParamSpec("P")
R = TypeVar("R")

ALL_ONES = 0xFFFFFFFFFFFFFFFF


def _quiet(function: Callable[P, R]) -> Callable[P, R]:
    """Silence NumPy's warnings: overflow and NaN are inputs like any other here."""

    @wraps(function)
    def silent(*args: P.args, **kwargs: P.kwargs) -> R:
        with np.errstate(all="ignore"):
            return function(*args, **kwargs)

    return silent


# ---- numbers ----------------------------------------------------------------------------------


def _bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _round_to_odd(values: np.ndarray) -> np.ndarray:
    """Narrow float64 to float32 so that one more rounding gives what a single one would; NaN has one payload."""
    nearest = values.astype(np.float32)
    bits = nearest.view(np.uint32).copy()
    bits -= np.abs(nearest.astype(np.float64)) > np.abs(values)
    bits[nearest.astype(np.float64) != values] |= 1
    bits[np.isnan(values)] = 0x7FFFFFFF
    rounded: np.ndarray = bits.view(np.float32)
    return rounded


@_quiet
def load(tensor: Tensor) -> np.ndarray:
    """Return the values of a tensor in the type that arithmetic uses: float32 or float64."""
    if tensor.dtype is torch.bfloat16:
        return (tensor.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    return tensor.numpy().astype(np.float64 if tensor.dtype is torch.float64 else np.float32)


@_quiet
def store(tensor: Tensor, values: np.ndarray) -> None:
    """Write float32 or float64 values, rounded once to the dtype of the tensor."""
    if tensor.dtype is torch.bfloat16:
        narrow = _round_to_odd(values) if values.dtype == np.float64 else values
        tensor.view(torch.uint16).numpy()[:] = _bfloat16_bits(narrow)
    else:
        tensor.numpy()[:] = values


def _unpacked(bits: Tensor | np.ndarray, count: int) -> np.ndarray:
    """Return the first ``count`` bits as booleans."""
    words = bits if isinstance(bits, np.ndarray) else bits.numpy()
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:count].astype(bool)


def _write_bits(bits: Tensor, values: np.ndarray) -> None:
    padded = np.zeros(64 * bits.numel(), dtype=bool)
    padded[: values.size] = values
    bits.numpy()[:] = np.packbits(padded, bitorder="little").view(np.int64)


# ---- random words -----------------------------------------------------------------------------


def philox4x32(counter: Sequence[Any], key: Sequence[int]) -> tuple[Any, ...]:
    """Run ten rounds of Philox4x32; every counter word may be an integer or an array."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = int(key[0]), int(key[1])
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0 = (p1 >> half) ^ c1 ^ np.uint64(k0)
        c2 = (p0 >> half) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & low, p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    words = (c0, c1, c2, c3)
    return tuple(int(w) for w in words) if c0.ndim == 0 else words


def random_words(key: Key, first: int, count: int, digit: int = 0) -> np.ndarray:
    """Return words ``first .. first + count`` of one digit of a stream, as ``uint64``."""
    k0, k1, c1, c2, c3 = key.words()
    groups = np.arange(first // 2, (first + count + 1) // 2, dtype=np.uint64)
    constants = (np.full_like(groups, word) for word in (c1 | digit, c2, c3))
    r0, r1, r2, r3 = philox4x32((groups, *constants), (k0, k1))
    both: np.ndarray = np.stack([r1 << np.uint64(32) | r0, r3 << np.uint64(32) | r2], axis=1).reshape(-1)
    return both[first % 2 : first % 2 + count]


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
    ones = sum(_unpacked(part, count).astype(np.int64) for part in parts)
    _write_bits(out, np.asarray(2 * ones >= len(parts)))


# ---- one bit per element ----------------------------------------------------------------------


@_quiet
def _offered(grad: Tensor, residual: Tensor | None) -> np.ndarray:
    return load(grad) if residual is None else load(grad) + residual.numpy()


def _own_bits(x: np.ndarray, key: Key | None, word_offset: int) -> np.ndarray:
    if key is None:
        return np.asarray(x >= 0)
    words = random_words(key, word_offset, -(-x.size // 64))
    bits: np.ndarray = (x > 0) | ((x == 0) & _unpacked(words, x.size))
    return bits


def _row_sum(row: np.ndarray) -> float:
    """Sum one row of magnitudes in the fixed order that ``hvc/tree.h`` describes."""
    blocks = -(-row.size // 1024)
    padded = np.zeros(1024 * blocks, dtype=row.dtype)
    padded[: row.size] = row
    by_lane = padded.reshape(blocks, 32, 32)  # block, position in the lane, lane
    lanes = np.zeros((blocks, 32), dtype=row.dtype)
    for position in range(32):
        lanes += by_lane[:, position]
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:, :half] + lanes[:, half:]
    total = 0.0
    for first in range(0, blocks, 64):
        superblock = 0.0
        for value in lanes[first : first + 64, 0]:
            superblock += float(value)
        total += superblock
    return total


@_quiet
def row_sums(magnitudes: np.ndarray, row_length: int) -> np.ndarray:
    starts = range(0, magnitudes.size, row_length)
    return np.array([_row_sum(magnitudes[start : start + row_length]) for start in starts])


def most_kept(x: np.ndarray) -> Any:
    """Return the bound of what is kept with momentum."""
    return x.dtype.type(2.0) ** (1022 if x.dtype == np.float64 else 126)


def bounded(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.clip(x, -most_kept(x), most_kept(x)))


def too_large(x: np.ndarray) -> int:
    """Return how many values cannot be taken in where signs or factors stand for elements; NaN is one."""
    return int(np.count_nonzero(~(np.abs(x) < 2.0**96)))


def left_over(x: np.ndarray) -> np.ndarray:
    """Cut off what may be larger than the ``x`` that it is left of."""
    return np.asarray(np.clip(x, x.dtype.type(-(2.0**95)), x.dtype.type(2.0**95)))


def sign_pack(x: Tensor, bits: Tensor) -> None:
    _write_bits(bits, load(x) >= 0)


def sign_offer(
    grad: Tensor,
    residual: Tensor | None,
    bits: Tensor,
    sums: Tensor | None,
    row_length: int,
    *,
    key: Key | None = None,
    word_offset: int = 0,
) -> int:
    x = _offered(grad, residual)
    _write_bits(bits, _own_bits(x, key, word_offset))
    if sums is not None:
        sums.numpy()[:] = row_sums(np.abs(x), row_length)
    return too_large(x)


@_quiet
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
) -> None:
    x = _offered(grad, residual)
    step = np.repeat(steps.numpy(), row_length)[: x.size].astype(x.dtype)
    decoded = np.where(_unpacked(bits, x.size), step, -step)
    if zeros is not None:
        decoded[_unpacked(zeros, x.size)] = 0
    if residual is not None:
        own = np.where(_own_bits(x, key, word_offset), step, -step)
        left = {"global": left_over(x - decoded), "own": x - own, "momentum": x}[feedback]
        residual.numpy()[:] = left * x.dtype.type(decay)
    store(grad, decoded * x.dtype.type(scale))


@_quiet
def sign_offer_all(
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    bits: Sequence[Tensor],
    steps: Sequence[Tensor] | None,
    row_lengths: Sequence[int],
    ranks: int = 1,
    key: Key | None = None,
    word_offsets: Sequence[int] | None = None,
) -> Tensor:
    counts = []
    for i, (grad, row_length) in enumerate(zip(grads, row_lengths, strict=True)):
        residual = residuals[i] if residuals else None
        sums = torch.zeros(steps[i].numel(), dtype=torch.float64) if steps else None
        offset = word_offsets[i] if word_offsets else 0
        counts.append(sign_offer(grad, residual, bits[i], sums, row_length, key=key, word_offset=offset))
        if steps and sums is not None:
            first = np.arange(sums.numel()) * row_length
            sizes = np.minimum(row_length, grad.numel() - first)
            steps[i].numpy()[:] = sums.numpy() / (sizes * ranks)
    return torch.tensor(counts, dtype=torch.int64)


def sign_decode_all(
    bits: Sequence[Tensor],
    steps: Sequence[Tensor],
    row_lengths: Sequence[int],
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    *,
    word_offsets: Sequence[int] | None = None,
    zeros: Sequence[Tensor] | None = None,
    **options: Any,
) -> None:
    for i, (grad, row_length) in enumerate(zip(grads, row_lengths, strict=True)):
        residual, offset = residuals[i] if residuals else None, word_offsets[i] if word_offsets else 0
        none = zeros[i] if zeros else None
        sign_decode(bits[i], steps[i], row_length, grad, residual, word_offset=offset, zeros=none, **options)


def sign_unpack(bits: Tensor, steps: Tensor, row_length: int, out: Tensor, *, scale: float = 1.0) -> None:
    sign_decode(bits, steps, row_length, out, None, feedback="none", scale=scale)


@_quiet
def points_offer(
    grad: Tensor, residual: Tensor | None, bits: Tensor, highs: Tensor, lows: Tensor, ones: Tensor, row_length: int
) -> int:
    x = _offered(grad, residual)
    high, none = x >= 0, x.dtype.type(0)
    _write_bits(bits, high)
    highs.numpy()[:] = row_sums(np.where(high, np.abs(x), none), row_length)
    lows.numpy()[:] = row_sums(np.where(high, none, np.abs(x)), row_length)
    starts = range(0, x.size, row_length)
    ones.numpy()[:] = [np.count_nonzero(high[start : start + row_length]) for start in starts]
    return too_large(x)


@_quiet
def points_decode(
    bits: Sequence[Tensor],
    highs: Sequence[Tensor],
    lows: Sequence[Tensor] | None,
    row_length: int,
    own: int,
    grad: Tensor,
    residual: Tensor,
    *,
    scale: float = 1.0,
) -> None:
    x = _offered(grad, residual)

    def spread(values: Tensor) -> np.ndarray:
        return np.asarray(np.repeat(values.numpy(), row_length)[: x.size].astype(x.dtype))

    sent = []
    for rank, high in enumerate(map(spread, highs)):
        sent.append(np.where(_unpacked(bits[rank], x.size), high, -high if lows is None else spread(lows[rank])))
    total = sent[0].copy()
    for values in sent[1:]:
        total += values
    residual.numpy()[:] = x - sent[own]
    store(grad, total * x.dtype.type(scale))


def points_offer_all(grads: Sequence[Tensor], residuals: Sequence[Tensor] | None, *each: Sequence[Any]) -> Tensor:
    mine: Sequence[Tensor | None] = residuals or [None] * len(grads)
    given = zip(grads, mine, *each, strict=True)
    return torch.tensor([points_offer(*one) for one in given], dtype=torch.int64)


def points_decode_all(
    bits: Sequence[Tensor],
    highs: Sequence[Tensor],
    lows: Sequence[Tensor] | None,
    row_lengths: Sequence[int],
    own: int,
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor],
    *,
    first_words: Sequence[int],
    first_rows: Sequence[int],
    scale: float = 1.0,
) -> None:
    for grad, residual, row_length, word, row in zip(
        grads, residuals, row_lengths, first_words, first_rows, strict=True
    ):
        rows = slice(row, row - (-grad.numel() // row_length))
        sent = [part[word : word - (-grad.numel() // 64)] for part in bits]
        high, low = [part[rows] for part in highs], [part[rows] for part in lows] if lows else None
        points_decode(sent, high, low, row_length, own, grad, residual, scale=scale)


# ---- dithering ----------------------------------------------------------------------------------


@_quiet
def norm_offer(grad: Tensor, norms: Tensor, row_length: int, *, power: int = 0) -> int:
    x = load(grad)
    kept = np.where(np.isfinite(x), np.abs(x), x.dtype.type(0))
    if power:
        squares = (kept := kept.astype(np.float64)) * kept
        norms.numpy()[:] = row_sums({1: kept, 2: squares, 4: squares * squares}[power], row_length)
    else:
        starts = range(0, x.size, row_length)
        norms.numpy()[:] = [kept[start : start + row_length].max() for start in starts]
    return int(np.count_nonzero(~np.isfinite(x)))


def draws(key: Key, first: int, count: int) -> np.ndarray:
    """Return 16 random bits for each of the elements ``first .. first + count``, as integers."""
    words = random_words(key, first // 4, (first + count + 3) // 4 - first // 4)
    pieces: np.ndarray = words.astype("<u8").view("<u2")[first % 4 :][:count].astype(np.int64)
    return pieces


@_quiet
def _scaled(grad: Tensor, norms: Tensor, row_length: int, target: float) -> np.ndarray:
    """Return ``x * target / norm`` in float32; the norm 0 gives 0, however infinite ``x`` is."""
    x, norm = load(grad), norms.numpy()
    work = x.dtype.type
    far = work(2.0) ** (512 if work is np.float64 else 64)
    power = np.where(norm < 1 / far, far, np.where(norm > far, 1 / far, work(1)))
    factor = np.where(norm > 0, work(target) / (norm * power), work(0))
    spread = [np.repeat(values, row_length)[: x.size] for values in (power, factor)]
    return np.asarray((x * spread[0] * spread[1]).astype(np.float32))


def _pack_codes(codes: Tensor, values: np.ndarray, bits: int) -> None:
    if bits == 4:
        padded = np.zeros(2 * codes.numel(), dtype=np.int64)
        padded[: values.size] = values & 15
        values = padded[::2] | padded[1::2] << 4
    codes.numpy()[:] = values.astype(np.int16 if bits == 16 else np.uint8)


def _unpack_codes(codes: Tensor, count: int, bits: int) -> np.ndarray:
    """Return codes as they lie in memory, not negative."""
    plain = codes.numpy().astype(np.int64) & 0xFFFF
    if bits == 4:
        plain = np.stack([plain & 15, plain >> 4], axis=1).reshape(-1)
    return np.asarray(plain[:count])


def _signed(codes: np.ndarray, bits: int) -> np.ndarray:
    return np.asarray(np.where(codes >> (bits - 1), codes - (1 << bits), codes))


@_quiet
def level_encode(
    grad: Tensor,
    norms: Tensor,
    row_length: int,
    codes: Tensor,
    key: Key,
    *,
    bits: int,
    levels: int,
    offset: int = 0,
    bounds: Tensor | None = None,
) -> None:
    limit = np.full(grad.numel(), 65536 * levels, dtype=np.float32)
    z = _scaled(grad, norms, row_length, float(65536 * levels))
    if bounds is not None:
        spread = torch.from_numpy(np.repeat(bounds.numpy(), row_length)[: grad.numel()])
        bounded = _scaled(spread, norms, row_length, float(65536 * levels))
        limit = np.where(bounded < limit, bounded, limit)
    z = np.where(z < limit, z, limit)
    z = np.where(z > -limit, z, -limit)
    _pack_codes(codes, (np.rint(z).astype(np.int64) + draws(key, offset, z.size)) >> 16, bits)


def level_add(into: Tensor, other: Tensor, *, bits: int) -> None:
    count = into.numel() * (2 if bits == 4 else 1)
    _pack_codes(into, _unpack_codes(into, count, bits) + _unpack_codes(other, count, bits), bits)


@_quiet
def _store_multiples(grad: Tensor, factors: np.ndarray, norms: Tensor, row_length: int, scale: float) -> None:
    """Write ``(factor * scale) * norm``."""
    norm = np.repeat(norms.numpy(), row_length)[: grad.numel()]
    store(grad, factors.astype(norm.dtype) * norm.dtype.type(scale) * norm)


@_quiet
def level_decode(codes: Tensor, norms: Tensor, row_length: int, grad: Tensor, *, bits: int, scale: float) -> None:
    factors = _signed(_unpack_codes(codes, grad.numel(), bits), bits)
    _store_multiples(grad, factors, norms, row_length, scale)


@_quiet
def octave_encode(
    grad: Tensor, norms: Tensor, row_length: int, codes: Tensor, key: Key, *, bits: int, headroom: int, offset: int = 0
) -> None:
    x = _scaled(grad, norms, row_length, 1.0)
    z, random = x.view(np.uint32).astype(np.int64), draws(key, offset, x.size)
    smallest = min((1 << (bits - 1)) - 1, headroom + 96)
    size = np.minimum(z & 0x7FFFFFFF, 0x3F800000)
    below = size < (127 + headroom - smallest) << 23
    large = 127 + headroom - (size + (random << 7) + 64 >> 23)
    tiny = np.where(below, size, 0).astype(np.uint32).view(np.float32)
    chance = np.rint(tiny * np.float32(2.0 ** (16 + smallest - headroom))).astype(np.int64)
    exponent = np.where(below, np.where(random < chance, smallest, 0), large)
    sign = np.where((x < 0) & (exponent > 0), 1 << (bits - 1), 0)
    _pack_codes(codes, exponent | sign, bits)


def octave_merge(into: Tensor, other: Tensor, key: Key, *, bits: int, offset: int = 0) -> None:
    count, sign = into.numel() * 8 // bits, 1 << (bits - 1)
    a, b = _unpack_codes(into, count, bits), _unpack_codes(other, count, bits)
    larger = np.where(b % sign < a % sign, b, a)  # a smaller exponent is a larger number
    distance, equal = np.abs(a % sign - b % sign), (a & sign) == (b & sign)
    trials = distance - ~equal
    hit = (draws(key, offset, count) % (1 << trials.clip(0, 16)) == 0) & (trials < 16)
    change = np.where(equal, -(hit & (larger % sign != 1)).astype(np.int64), hit)
    merged = np.where((distance == 0) & ~equal, 0, larger + change)
    _pack_codes(into, np.where(a % sign == 0, b, np.where(b % sign == 0, a, merged)), bits)


@_quiet
def octave_decode(
    codes: Tensor, norms: Tensor, row_length: int, grad: Tensor, *, bits: int, headroom: int, scale: float
) -> None:
    sign = 1 << (bits - 1)
    found = _unpack_codes(codes, grad.numel(), bits)
    power = np.where(found % sign, 2.0 ** (headroom - found % sign), 0.0)
    factor = np.where((found & sign != 0) & (found % sign != 0), -power, power)
    _store_multiples(grad, factor, norms, row_length, scale)


# ---- plain numbers ----------------------------------------------------------------------------


def dense_offer(grad: Tensor, residual: Tensor | None, out: Tensor) -> int:
    store(out, _offered(grad, residual))
    return int(np.count_nonzero(~np.isfinite(load(out))))


@_quiet
def dense_add(into: Tensor, other: Tensor) -> None:
    store(into, load(into) + load(other))


@_quiet
def dense_decode(payload: Tensor, grad: Tensor, *, scale: float, residual: Tensor | None = None) -> None:
    work = np.float64 if torch.float64 in (payload.dtype, grad.dtype) else np.float32
    store(grad, load(payload).astype(work) * work(scale))
    if residual is not None:
        residual.numpy()[:] = 0


def dense_offer_all(grads: Sequence[Tensor], residuals: Sequence[Tensor] | None, outs: Sequence[Tensor]) -> Tensor:
    mine: Sequence[Tensor | None] = residuals or [None] * len(grads)
    given = zip(grads, mine, outs, strict=True)
    return torch.tensor([dense_offer(*each) for each in given], dtype=torch.int64)


def dense_decode_all(
    payloads: Sequence[Tensor], grads: Sequence[Tensor], *, scale: float, residuals: Sequence[Tensor] | None = None
) -> None:
    for i, (payload, grad) in enumerate(zip(payloads, grads, strict=True)):
        dense_decode(payload, grad, scale=scale, residual=residuals[i] if residuals else None)


def triad(a: Tensor, b: Tensor, c: Tensor, s: float) -> None:
    a.numpy()[:] = b.numpy() + np.float32(s) * c.numpy()


# ---- checking bytes ---------------------------------------------------------------------------


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


_CRC_TABLE = _crc_table()


def crc32c(data: Tensor, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for byte in data.numpy().tobytes():
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc32c_copy(dst: Tensor, src: Tensor, crc: int = 0) -> int:
    dst.numpy()[:] = src.numpy()
    return crc32c(dst, crc)


def _mix(h: int) -> int:
    h ^= h >> 33
    h = h * 0xFF51AFD7ED558CCD & ALL_ONES
    h ^= h >> 33
    h = h * 0xC4CEB9FE1A85EC53 & ALL_ONES
    return h ^ h >> 33


@_quiet
def _hash_block(words: np.ndarray) -> int:
    """Hash up to 2048 words: word ``i`` is absorbed by lane ``i % 32``."""
    lanes = np.uint64(0x9E3779B97F4A7C15) * np.arange(1, 33, dtype=np.uint64)
    for first in range(0, words.size, 32):
        group = words[first : first + 32]
        state = lanes[: group.size] ^ group
        state += state << np.uint64(23)
        lanes[: group.size] = state ^ (state >> np.uint64(31))
    block = 0
    for lane in lanes:
        block = _mix(block ^ int(lane))
    return block


def hash64(data: Tensor, seed: int = 0) -> int:
    raw = data.numpy().tobytes()
    words = np.frombuffer(raw + bytes(-len(raw) % 8), dtype="<u8")
    h = _mix(seed & ALL_ONES)
    for first in range(0, words.size, 2048):
        h = _mix(h ^ _hash_block(words[first : first + 2048]))
    return _mix(h ^ len(raw))
