"""Norms of rows, and codes on a scale that all ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..keys import Key
from .numbers import draws, load, quiet, row_sums, store


@quiet
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


@quiet
def moments_offer(grad: Tensor, largest: Tensor, squares: Tensor, row_length: int) -> int:
    norm_offer(grad, squares, row_length, power=2)
    return norm_offer(grad, largest, row_length, power=0)


# ---- codes ------------------------------------------------------------------------------------


@quiet
def scaled(grad: Tensor, norms: Tensor, row_length: int, target: float) -> np.ndarray:
    """Return ``x * target / norm`` in float32; the norm 0 gives 0, however infinite ``x`` is."""
    x, norm = load(grad), norms.numpy()
    work = x.dtype.type
    far = work(2.0) ** (512 if work is np.float64 else 64)
    power = np.where(norm < 1 / far, far, np.where(norm > far, 1 / far, work(1)))
    factor = np.where(norm > 0, work(target) / (norm * power), work(0))
    spread = [np.repeat(values, row_length)[: x.size] for values in (power, factor)]
    return np.asarray((x * spread[0] * spread[1]).astype(np.float32))


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    if bits < 8:
        digits = values[:, None] >> np.arange(bits) & 1
        values = np.packbits(digits.astype(np.uint8), bitorder="little")
    return values.astype(np.int16 if bits == 16 else np.uint8)


def _pack_codes(codes: Tensor, values: np.ndarray, bits: int) -> None:
    codes.numpy()[:] = packed(values, bits)


def unpack_codes(codes: Tensor, count: int, bits: int) -> np.ndarray:
    """Return codes as they lie in memory, not negative."""
    if bits < 8:
        digits = np.unpackbits(codes.numpy(), bitorder="little")[: count * bits].reshape(count, bits)
        return np.asarray(digits.astype(np.int64) @ (1 << np.arange(bits)))
    return np.asarray(codes.numpy().astype(np.int64)[:count] & 0xFFFF)


def signed(codes: np.ndarray, bits: int) -> np.ndarray:
    return np.asarray(np.where(codes >> (bits - 1), codes - (1 << bits), codes))


def _powers(codes: np.ndarray, bits: int, headroom: int, mantissa: int) -> np.ndarray:
    """Return the numbers of codes that are signs and exponents, or count levels where there is a mantissa."""
    sign, levels = 1 << (bits - 1), 1 << mantissa
    above = headroom - codes % sign
    size = np.where(codes % sign, 2.0 ** (above // levels) * (1 + above % levels / levels), 0.0)
    return np.where((codes & sign != 0) & (codes % sign != 0), -size, size)


def rounded(z: np.ndarray, limit: Any, key: Key | None, offset: int) -> np.ndarray:
    """Round 1/65536 of numbers, of at most a magnitude, at random; NaN counts as one beyond it."""
    z = np.where(z < limit, z, limit)
    z = np.where(z > -limit, z, -limit)
    return np.asarray((np.rint(z).astype(np.int64) + draws(key, offset, z.size)) >> 16)


@quiet
def store_multiples(grad: Tensor, factors: np.ndarray, norms: Tensor, row_length: int, scale: float) -> None:
    """Write ``(factor * scale) * norm``."""
    norm = np.repeat(norms.numpy(), row_length)[: grad.numel()]
    store(grad, factors.astype(norm.dtype) * norm.dtype.type(scale) * norm)


@quiet
def uniform_encode(
    grad: Tensor,
    norms: Tensor,
    row_length: int,
    codes: Tensor,
    key: Key | None,
    *,
    bits: int,
    levels: int,
    offset: int = 0,
    bounds: Tensor | None = None,
) -> None:
    limit = np.full(grad.numel(), 65536 * levels, dtype=np.float32)
    z = scaled(grad, norms, row_length, float(65536 * levels))
    if bounds is not None:
        spread = torch.from_numpy(np.repeat(bounds.numpy(), row_length)[: grad.numel()])
        bounded = scaled(spread, norms, row_length, float(65536 * levels))
        limit = np.where(bounded < limit, bounded, limit)
    _pack_codes(codes, rounded(z, limit, key, offset), bits)


def uniform_add(into: Tensor, other: Tensor, *, bits: int) -> None:
    count = into.numel() * (2 if bits == 4 else 1)
    _pack_codes(into, unpack_codes(into, count, bits) + unpack_codes(other, count, bits), bits)


def uniform_fold(parts: Sequence[Tensor], out: Tensor, count: int, *, bits: int, sum_bits: int) -> None:
    codes = [signed(unpack_codes(part, count, bits), bits) for part in parts]
    _pack_codes(out, np.sum(codes, axis=0), sum_bits)


@quiet
def uniform_decode(codes: Tensor, norms: Tensor, row_length: int, grad: Tensor, *, bits: int, scale: float) -> None:
    factors = signed(unpack_codes(codes, grad.numel(), bits), bits)
    store_multiples(grad, factors, norms, row_length, scale)


@quiet
def exponential_encode(
    grad: Tensor,
    norms: Tensor,
    row_length: int,
    codes: Tensor,
    key: Key,
    *,
    bits: int,
    headroom: int,
    mantissa: int = 0,
    offset: int = 0,
) -> None:
    x = scaled(grad, norms, row_length, 1.0)
    z, random = x.view(np.uint32).astype(np.int64), draws(key, offset, x.size)
    octaves = min(((1 << (bits - 1)) - 1 - headroom) >> mantissa, 96)
    size = np.minimum(z & 0x7FFFFFFF, 0x3F800000)
    below = size < (127 - octaves) << 23
    dropped = 23 - mantissa
    drawn = (2 * random + 1) << (dropped - 17)  # the middle of an interval of 2^-16
    large = (127 << mantissa) + headroom - (size + drawn >> dropped)
    tiny = np.where(below, size, 0).astype(np.uint32).view(np.float32)
    chance = np.rint(tiny * np.float32(2.0 ** (16 + octaves))).astype(np.int64)
    exponent = np.where(below, np.where(random < chance, headroom + (octaves << mantissa), 0), large)
    sign = np.where((x < 0) & (exponent > 0), 1 << (bits - 1), 0)
    _pack_codes(codes, exponent | sign, bits)


def exponential_merge(into: Tensor, other: Tensor, key: Key, *, bits: int, offset: int = 0) -> None:
    count, sign = into.numel() * 8 // bits, 1 << (bits - 1)
    a, b = unpack_codes(into, count, bits), unpack_codes(other, count, bits)
    larger = np.where(b % sign < a % sign, b, a)  # a smaller exponent is a larger number
    distance, equal = np.abs(a % sign - b % sign), (a & sign) == (b & sign)
    trials = distance - ~equal
    hit = (draws(key, offset, count) % (1 << trials.clip(0, 16)) == 0) & (trials < 16)
    change = np.where(equal, -(hit & (larger % sign != 1)).astype(np.int64), hit)
    merged = np.where((distance == 0) & ~equal, 0, larger + change)
    _pack_codes(into, np.where(a % sign == 0, b, np.where(b % sign == 0, a, merged)), bits)


@quiet
def exponential_fold(
    parts: Sequence[Tensor], out: Tensor, key: Key, *, headroom: int, mantissa: int = 0, offset: int = 0
) -> None:
    sums = None
    for part in parts:
        values = _powers(unpack_codes(part, part.numel(), 8), 8, headroom, mantissa).astype(np.float32)
        sums = values if sums is None else sums + values
    assert sums is not None
    mean = torch.from_numpy(sums * (np.float32(1) / np.float32(len(parts))))
    rule = {"bits": 8, "headroom": headroom, "mantissa": mantissa}
    exponential_encode(mean, torch.ones(1, device="cpu"), max(1, mean.numel()), out, key, **rule, offset=offset)


@quiet
def exponential_decode(
    codes: Tensor,
    norms: Tensor,
    row_length: int,
    grad: Tensor,
    *,
    bits: int,
    headroom: int,
    scale: float,
    mantissa: int = 0,
) -> None:
    factors = _powers(unpack_codes(codes, grad.numel(), bits), bits, headroom, mantissa)
    store_multiples(grad, factors, norms, row_length, scale)
