"""QSGD's records, those of LoCo, and sections of Elias codes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..keys import Key
from .numbers import load, quiet, row_sums, store
from .quantise import packed, rounded, scaled, signed, store_multiples, unpack_codes

# ---- records ------------------------------------------------------------------------------------

ELIAS_RANGE, NORM_BYTES = 8192, 4
_MOST = np.finfo(np.float32).max


@quiet
def _norms(x: np.ndarray, block: int, norm: int) -> np.ndarray:
    """Return the norm of every block: the next float32 that is no smaller, and finite."""
    kept = np.where(np.isfinite(x), np.abs(x), 0).astype(np.float64)
    exact = np.array([kept[at : at + block].max() for at in range(0, x.size, block)], dtype=np.float64)
    if norm:
        exact = np.maximum(np.sqrt(row_sums(kept**2, block)), exact)
    return _at_least(exact)


def _at_least(exact: np.ndarray) -> np.ndarray:
    nearest = np.where(exact < _MOST, exact, _MOST).astype(np.float32)
    above = np.nextafter(nearest, np.float32(np.inf))
    return np.asarray(np.where((nearest < exact) & (nearest < _MOST), above, nearest))


@quiet
def _levels(x: np.ndarray, norms: np.ndarray, block: int, bits: int, key: Key | None, offset: int) -> np.ndarray:
    """Return the code of every element."""
    limit = np.float32(65536 * _top(bits))
    z = scaled(torch.from_numpy(x), torch.from_numpy(norms.astype(x.dtype)), block, float(limit))
    return rounded(z, limit, key, offset)


def _top(bits: int) -> int:
    return (1 << (bits - 1)) - 1


def _write(records: Tensor, norms: np.ndarray, codes: np.ndarray, block: int, bits: int) -> None:
    padded = np.zeros(norms.size * block, dtype=np.int64)
    padded[: codes.size] = codes
    rows = records.numpy().reshape(-1, NORM_BYTES + block * bits // 8)
    rows[:, :NORM_BYTES] = norms.view(np.uint8).reshape(-1, NORM_BYTES)
    rows[:, NORM_BYTES:] = packed(padded, bits).reshape(-1, block * bits // 8)


def _read(records: Tensor, block: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the norms and the codes of all blocks."""
    rows = records.numpy().reshape(-1, NORM_BYTES + block * bits // 8)
    norms = np.ascontiguousarray(rows[:, :NORM_BYTES]).view(np.float32).reshape(-1)
    codes = torch.from_numpy(np.ascontiguousarray(rows[:, NORM_BYTES:]).reshape(-1))
    return norms, signed(unpack_codes(codes, norms.size * block, bits), bits)


def qsgd_encode(
    grad: Tensor, records: Tensor, key: Key | None, *, bits: int, block: int, norm: int, offset: int = 0
) -> int:
    x = load(grad)
    norms = _norms(x, block, norm)
    _write(records, norms, _levels(x, norms, block, bits, key, offset), block, bits)
    return int(np.count_nonzero(~np.isfinite(x)))


@quiet
def qsgd_fold(
    parts: Sequence[Tensor], out: Tensor, key: Key, *, bits: int, block: int, norm: int, offset: int = 0
) -> None:
    read = [_read(part, block, bits) for part in parts]
    power = _power_for(np.max([norms for norms, _ in read], axis=0))
    sums = _sums(read, power, block, bits)
    found = np.minimum(_norms(sums, block, norm), (_MOST * power) * np.float32(len(parts)))
    _write(out, _mean_norm(found, power, len(parts)), _levels(sums, found, block, bits, key, offset), block, bits)


def _power_for(largest: np.ndarray) -> np.ndarray:
    """Return what norms are multiplied by, so that sums are normal numbers."""
    one, far = np.float32(1), np.float32(2.0**64)
    return np.where(largest < 1 / far, far, np.where(largest > far, 1 / far, one))


def _sums(read: Sequence[tuple[np.ndarray, np.ndarray]], power: np.ndarray, block: int, bits: int) -> np.ndarray:
    sums = None
    for norms, codes in read:
        values = codes.astype(np.float32) * np.repeat((norms * power) / np.float32(_top(bits)), block)
        sums = values if sums is None else sums + values
    assert sums is not None
    return sums


def _mean_norm(found: np.ndarray, power: np.ndarray, ranks: int) -> np.ndarray:
    return np.asarray(np.minimum((found / np.float32(ranks)) / power, _MOST))


def qsgd_decode(records: Tensor, grad: Tensor, *, bits: int, block: int, scale: float) -> None:
    norms, codes = _read(records, block, bits)
    wide = torch.from_numpy(norms.astype(load(grad).dtype))
    store_multiples(grad, codes[: grad.numel()], wide, block, scale)


# ---- records of LoCo ----------------------------------------------------------------------------


@quiet
def loco_encode(
    grad: Tensor,
    kept: Tensor | None,
    records: Tensor,
    left: Tensor,
    *,
    bits: int,
    block: int,
    norm: int,
    kept_bits: int,
    beta: float,
) -> int:
    x = load(grad)
    errors = _errors(kept, x, block, kept_bits)
    x = x + errors
    norms, one = _norms(x, block, norm), np.ones(1, dtype=np.float32)
    _put_both(x, errors, norms, one, 1, records, left, bits=bits, block=block, kept_bits=kept_bits, beta=beta)
    return int(np.count_nonzero(~np.isfinite(x)))


@quiet
def loco_fold(
    parts: Sequence[Tensor],
    kept: Tensor | None,
    out: Tensor,
    left: Tensor,
    *,
    bits: int,
    block: int,
    norm: int,
    kept_bits: int,
    beta: float,
) -> None:
    read, ranks = [_read(part, block, bits) for part in parts], np.float32(len(parts))
    largest = np.max([norms for norms, _ in read], axis=0)
    if kept is not None:
        before = _read(kept, block, kept_bits)[0]
        largest = np.where(before > largest, before, largest)
    power = _power_for(largest)
    sums = _sums(read, power, block, bits)
    errors = _errors(kept, sums, block, kept_bits) * np.repeat(power * ranks, block)
    sums = sums + errors
    found = np.minimum(_norms(sums, block, norm), (_MOST * power) * ranks)
    widths = {"bits": bits, "block": block, "kept_bits": kept_bits}
    _put_both(sums, errors, found, power, len(parts), out, left, **widths, beta=beta)


def _errors(kept: Tensor | None, like: np.ndarray, block: int, kept_bits: int) -> np.ndarray:
    """Return what was kept of the errors of as many elements."""
    if kept is None:
        return np.zeros_like(like)
    found = torch.from_numpy(np.empty_like(like))
    qsgd_decode(kept, found, bits=kept_bits, block=block, scale=1 / _top(kept_bits))
    return found.numpy()


def _put_both(
    x: np.ndarray,
    errors: np.ndarray,
    norms: np.ndarray,
    power: np.ndarray,
    ranks: int,
    records: Tensor,
    left: Tensor,
    *,
    bits: int,
    block: int,
    kept_bits: int,
    beta: float,
) -> None:
    """Write the records of values, and those of what is kept of them, with the norms of means."""
    kind, spread = x.dtype.type, np.repeat(norms, block)[: x.size]
    codes = _levels(x, norms, block, bits, None, 0)
    inside = np.where(x < spread, x, spread.astype(x.dtype))
    inside = np.where(inside > -spread, inside, -spread.astype(x.dtype))
    lost = inside - (codes.astype(x.dtype) * kind(1 / _top(bits))) * spread.astype(x.dtype)
    lost = kind(beta) * errors + kind(1 - beta) * lost
    largest = _norms(lost, block, 0)
    _write(left, _mean_norm(largest, power, ranks), _levels(lost, largest, block, kept_bits, None, 0), block, kept_bits)
    _write(records, _mean_norm(norms, power, ranks), codes, block, bits)


# ---- sections of Elias codes --------------------------------------------------------------------


def _gamma(k: int) -> str:
    """Return the code of a number in the order of its bits in the stream."""
    low = k.bit_length() - 1
    return "0" * low + "1" + "".join(str(k >> i & 1) for i in range(low))


def _stream(codes: np.ndarray) -> bytes:
    bits, next_ = [], 0
    for at in np.flatnonzero(codes):
        level = int(codes[at])
        bits += [_gamma(int(at) - next_ + 1), "1" if level < 0 else "0", _gamma(abs(level))]
        next_ = int(at) + 1
    if next_ < codes.size:
        bits.append(_gamma(codes.size - next_ + 1))
    text = "".join(bits)
    digits = np.array([int(bit) for bit in text + "1" * (-len(text) % 8)], dtype=np.uint8)
    return np.packbits(digits, bitorder="little").tobytes()


class _Bits:
    """A stream that is read from its start; what is wrong with it is an error."""

    def __init__(self, raw: bytes) -> None:
        self._bits = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), bitorder="little").tolist()
        self._at = 0

    def take(self, count: int) -> list[int]:
        found = self._bits[self._at : self._at + count]
        if len(found) < count:
            raise ValueError("the stream ends inside a code")
        self._at += count
        return found

    def gamma(self) -> int:
        low = 0
        while self.take(1) == [0]:
            low += 1
            if low > 13:
                raise ValueError("a number is larger than a range")
        return 1 << low | sum(bit << i for i, bit in enumerate(self.take(low)))


def _levels_of(raw: bytes, count: int, top: int) -> np.ndarray:
    found, bits, next_ = np.zeros(count, dtype=np.int64), _Bits(raw), 0
    while next_ < count:
        at = next_ + bits.gamma() - 1
        if at > count:
            raise ValueError("a position leaves the range")
        if at < count:
            sign, size = bits.take(1), bits.gamma()
            if size > top:
                raise ValueError("a level is too large")
            found[at] = -size if sign == [1] else size
        next_ = at + 1
    return found


@quiet
def _widest(x: np.ndarray, bits: int, error: float) -> np.ndarray:
    """Return the largest norm of those tried with which a block loses no more than a share of its squares."""
    kept, top = np.where(np.isfinite(x), np.abs(x), 0).astype(np.float64), _top(bits)
    largest, most = _at_least(kept.max()), np.float64(error) * row_sums(kept**2, x.size)[0]
    safely, best = 1 - 1 / 64, largest
    tried = max(largest, _at_least(safely * (top * np.sqrt(12 * most / x.size))))
    for _ in range(6 if most > 0 else 0):
        norm = np.array([tried], dtype=np.float32)
        codes = _levels(x, norm, x.size, bits, None, 0)
        lost = x - (codes.astype(x.dtype) * x.dtype.type(1 / top)) * x.dtype.type(tried)
        squares = row_sums(np.where(np.isfinite(lost), lost, 0).astype(np.float64) ** 2, x.size)[0]
        if squares <= most:
            best = max(best, tried)
            if squares >= 0.9 * most:
                break
        factor = safely * np.sqrt(most / squares)
        tried = max(best, _at_least(np.float64(tried) * (factor if factor < 2 else 2.0)))
    return best


def elias_encode(
    grad: Tensor,
    place: Tensor,
    out: Tensor,
    key: Key | None,
    *,
    bits: int,
    block: int,
    norm: int,
    offset: int = 0,
    error: float = 0.0,
) -> int:
    x, length = load(grad), max(1, ELIAS_RANGE // block) * block
    if error:
        norms = np.array([_widest(x[at : at + block], bits, error) for at in range(0, x.size, block)], dtype=np.float32)
    else:
        norms = _norms(x, block, norm)
    codes = _levels(x, norms, block, bits, key, offset)
    streams = [_stream(codes[at : at + length]) for at in range(0, x.size, length)]
    lengths = np.array([len(stream) for stream in streams], dtype=np.uint32)
    section = np.frombuffer(lengths.tobytes() + norms.tobytes() + b"".join(streams), dtype=np.uint8)
    begin = int(place[0])
    place[1] = begin + section.size if begin >= 0 else -1
    if begin >= 0:
        out.numpy()[begin : begin + section.size] = section
    return int(np.count_nonzero(~np.isfinite(x)))


@quiet
def elias_decode(sections: Sequence[Tensor], grad: Tensor, *, bits: int, block: int, scale: float) -> int:
    kind, wrong = load(grad).dtype, 0
    count, length = grad.numel(), max(1, ELIAS_RANGE // block) * block
    ranges, blocks = -(-count // length), -(-count // block)
    total = np.zeros(count, dtype=kind)
    for section in sections:
        raw = section.numpy().tobytes()
        at = 4 * ranges + NORM_BYTES * blocks
        if len(raw) < at:
            wrong += ranges
            continue
        lengths = np.frombuffer(raw[: 4 * ranges], dtype=np.uint32)
        norms = np.repeat(np.frombuffer(raw[4 * ranges : at], dtype=np.float32).astype(kind), block)
        for number, size in enumerate(lengths.tolist()):
            part = slice(number * length, min((number + 1) * length, count))
            try:
                if at + size > len(raw):
                    raise ValueError("the stream leaves the section")
                levels = _levels_of(raw[at : at + size], part.stop - part.start, _top(bits))
                values = (levels.astype(kind) * kind.type(scale)) * norms[part]
                total[part] += np.where(levels != 0, values, kind.type(0))
            except ValueError:
                wrong += 1
            at += size
    store(grad, total)
    return wrong
