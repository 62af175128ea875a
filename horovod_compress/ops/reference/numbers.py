"""What the references share: numbers, bits, random words, and the order of sums."""

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
_MOST_SHORT = float.fromhex("0x1.fffffep95")  # see csrc/rules/kept.h


def quiet(function: Callable[P, R]) -> Callable[P, R]:
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


@quiet
def load(tensor: Tensor) -> np.ndarray:
    """Return the values of a tensor in the type that arithmetic uses: float32 or float64."""
    if tensor.dtype is torch.bfloat16:
        return (tensor.view(torch.uint16).numpy().astype(np.uint32) << 16).view(np.float32)
    return tensor.numpy().astype(np.float64 if tensor.dtype is torch.float64 else np.float32)


@quiet
def store(tensor: Tensor, values: np.ndarray) -> None:
    """Write float32 or float64 values, rounded once to the dtype of the tensor."""
    if tensor.dtype is torch.bfloat16:
        narrow = _round_to_odd(values) if values.dtype == np.float64 else values
        tensor.view(torch.uint16).numpy()[:] = _bfloat16_bits(narrow)
    else:
        tensor.numpy()[:] = values


@quiet
def keep(tensor: Tensor, values: np.ndarray, key: Key | None, first: int) -> None:
    """Write what is kept; in bfloat16, rounded up as often as what is cut off is a part of a unit.

    Args:
        key: names the random bits.
        first: the number of the first element in the bucket.
    """
    if tensor.dtype is not torch.bfloat16:
        tensor.numpy()[:] = values
        return
    assert key is not None
    factor, moved = (int(word) & 0xFFFFFFFF for word in random_words(key, 0, 2))
    place = (np.arange(first, first + values.size, dtype=np.uint64) * (factor | 1) + moved).astype(np.uint32)
    if values.dtype == np.float64:
        values = np.where(np.abs(values) > _MOST_SHORT, np.copysign(_MOST_SHORT, values), values)
    bits = values.astype(np.float32).view(np.uint32)
    draws = np.where(bits & 0x7FFFFFFF < 0x6F7F0000, place >> 16, np.uint32(0))
    rounded = bits + draws >> 16
    tensor.view(torch.uint16).numpy()[:] = rounded.astype(np.uint16)


@quiet
def offered(grad: Tensor, residual: Tensor | None, divisor: Tensor | None = None) -> np.ndarray:
    given = load(grad) if divisor is None else load(grad) / divisor.numpy()
    return given if residual is None else given + load(residual)


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


# ---- bits -------------------------------------------------------------------------------------


def unpacked(bits: Tensor | np.ndarray, count: int) -> np.ndarray:
    """Return the first ``count`` bits as booleans."""
    words = bits if isinstance(bits, np.ndarray) else bits.numpy()
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:count].astype(bool)


def write_bits(bits: Tensor, values: np.ndarray) -> None:
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
    k0, k1, c1, c2, c3, _ = key.words()
    groups = np.arange(first // 2, (first + count + 1) // 2, dtype=np.uint64)
    constants = (np.full_like(groups, word) for word in (c1 | digit, c2, c3))
    r0, r1, r2, r3 = philox4x32((groups, *constants), (k0, k1))
    both: np.ndarray = np.stack([r1 << np.uint64(32) | r0, r3 << np.uint64(32) | r2], axis=1).reshape(-1)
    return both[first % 2 : first % 2 + count]


def draws(key: Key | None, first: int, count: int) -> np.ndarray:
    """Return 16 random bits for each of the elements ``first .. first + count``, as integers; without a key 1/2."""
    if key is None:
        return np.full(count, 1 << 15, dtype=np.int64)
    words = random_words(key, first // 4, (first + count + 3) // 4 - first // 4)
    pieces: np.ndarray = words.astype("<u8").view("<u2")[first % 4 :][:count].astype(np.int64)
    return (pieces + key.shift) & 0xFFFF


# ---- sums -------------------------------------------------------------------------------------


LANES = 32


def lane_sums(products: np.ndarray) -> np.ndarray:
    """Add along the last axis: element j in lane j mod 32, in order, then the lanes pairwise."""
    *outer, count = products.shape
    padded = np.zeros((*outer, -(-count // LANES) * LANES), dtype=products.dtype)
    padded[..., :count] = products
    by_lane = padded.reshape(*outer, -1, LANES)
    lanes = np.zeros((*outer, LANES), dtype=products.dtype)
    for position in range(by_lane.shape[-2]):
        lanes += by_lane[..., position, :]
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[..., :half] + lanes[..., half:]
    return np.asarray(lanes[..., 0])


def _row_sum(row: np.ndarray) -> float:
    """Sum one row of magnitudes in the fixed order that ``rules/tree.h`` describes."""
    padded = np.zeros(-(-row.size // 1024) * 1024, dtype=row.dtype)
    padded[: row.size] = row
    blocks, total = lane_sums(padded.reshape(-1, 1024)), 0.0
    for first in range(0, blocks.size, 64):
        superblock = 0.0
        for value in blocks[first : first + 64]:
            superblock += float(value)
        total += superblock
    return total


@quiet
def row_sums(magnitudes: np.ndarray, row_length: int) -> np.ndarray:
    starts = range(0, magnitudes.size, row_length)
    return np.array([_row_sum(magnitudes[start : start + row_length]) for start in starts])
