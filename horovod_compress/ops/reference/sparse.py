"""Selection, and sections of positions and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .codebook import CODE_BITS, codes_of
from .numbers import bounded, load, offered, quiet, row_sums, store

# ---- selection --------------------------------------------------------------------------------


def _largest(sizes: np.ndarray, k: int) -> np.ndarray:
    """Return where the ``k`` largest positive sizes are, ascending; NaN is not positive."""
    positive = np.flatnonzero(sizes > 0)
    return np.sort(positive[np.argsort(-sizes[positive], kind="stable")[:k]])


def _not_finite(x: np.ndarray) -> int:
    return int(np.count_nonzero(~np.isfinite(x)))


@quiet
def top_select(
    grad: Tensor, residual: Tensor | None, k: int, positions: Tensor, values: Tensor, numbers: Tensor, *, whole: bool
) -> None:
    x = offered(grad, residual)
    kept = _largest(np.abs(x), k)
    positions.numpy()[: kept.size] = kept
    values.numpy()[: kept.size] = x[kept]
    numbers.numpy()[:] = kept.size, _not_finite(x), 0


@quiet
def chunk_select(
    grad: Tensor,
    residual: Tensor | None,
    last: int,
    positions: Tensor,
    values: Tensor,
    numbers: Tensor,
    *,
    chunk: int,
    k: int,
) -> None:
    x = offered(grad, residual)
    kept = np.zeros(0, dtype=np.int64)
    for start in range(0, x.size, chunk):
        sizes = np.abs(x[start : start + chunk])
        kept = np.concatenate([kept, start + _largest(sizes, k if sizes.size == chunk else last)])
    positions.numpy()[: kept.size] = kept
    values.numpy()[: kept.size] = x[kept]
    numbers.numpy()[:] = kept.size, _not_finite(x), 0


def _power_below(total: float) -> float:
    """Return the power of two at or below a positive number, kept among the normal numbers."""
    exponent = math.frexp(total)[1] - 1 if math.isfinite(total) else 1023
    return math.ldexp(1.0, max(exponent, -1022))


@quiet
def binary_select(
    grad: Tensor, residual: Tensor | None, k: int, positions: Tensor, mean: Tensor, numbers: Tensor, *, whole: bool
) -> None:
    x = offered(grad, residual)
    sides = [_largest(x, k), _largest(-x, k)]
    totals = [row_sums(x[side].astype(np.float64), max(side.size, 1)).sum() for side in sides]
    unit = _power_below(max(abs(total) for total in totals))
    scaled = [total / unit for total in totals]
    removed = [total * total / side.size if side.size else -1.0 for total, side in zip(scaled, sides, strict=True)]
    winner = int(removed[1] > removed[0])
    kept = sides[winner]
    mean.numpy()[:] = totals[winner] / kept.size if kept.size else 0.0
    positions.numpy()[: kept.size] = kept
    numbers.numpy()[:] = kept.size, _not_finite(x), 0


def count_nonfinite(grad: Tensor) -> int:
    return _not_finite(load(grad))


# ---- Golomb codes -----------------------------------------------------------------------------


def _stream(gaps: np.ndarray, b: int) -> bytes:
    """Code the gaps of one range."""
    bits: list[int] = []
    for gap in gaps.tolist():
        bits += [1] * (gap >> b) + [0] + [gap >> i & 1 for i in range(b)]
    bits += [1] * (-len(bits) % 8)
    return np.packbits(np.array(bits, dtype=np.uint8), bitorder="little").tobytes()


def _section(
    positions: Tensor,
    kept: int,
    b: int,
    elements: int,
    head: bytes,
    values: np.ndarray | None,
    form: str,
) -> bytes | None:
    """Return a head, what the ranges' parts take, and these: a stream, and values if there are some."""
    at, length = positions.numpy()[:kept].astype(np.int64), 1 << b + 11
    if (np.diff(at) < 1).any() or (at < 0).any() or (at >= elements).any():
        return None
    lengths, ranges = [], []
    for start in range(0, elements, length):
        inside = (at >= start) & (at < start + length)
        stream = _stream(np.diff(at[inside], prepend=start - 1) - 1, b)
        lengths += [len(stream)] if values is None else [len(stream), int(inside.sum())]
        ranges += [stream] if values is None else [stream, _coded(values[inside], form, head)]
    return head + np.array(lengths, dtype="<u4").tobytes() + b"".join(ranges)


def _put(section: bytes | None, place: Tensor, out: Tensor) -> None:
    begin = int(place[0])
    place[1] = -1
    if section is not None and begin >= 0:
        place[1] = end = begin + len(section)
        out.numpy()[begin:end] = np.frombuffer(section, dtype=np.uint8)


def binary_encode(
    positions: Tensor, kept: int, mean: Tensor, elements: int, parameter: int, ends: Tensor, out: Tensor
) -> None:
    _put(_section(positions, kept, parameter, elements, mean.numpy().tobytes(), None, ""), ends, out)


def _positions(stream: bytes, b: int, start: int, end: int) -> tuple[list[int], int]:
    """Decode one range: its positions up to what is malformed, and whether anything is."""
    bits = np.unpackbits(np.frombuffer(stream, dtype=np.uint8), bitorder="little").tolist()
    found: list[int] = []
    at, following = 0, start
    while True:
        zero = at
        while zero < len(bits) and bits[zero]:
            zero += 1
        if zero == len(bits) and zero - at < 8:
            return found, 0
        low = bits[zero + 1 : zero + 1 + b]
        following += ((zero - at) << b) + sum(bit << i for i, bit in enumerate(low))
        if zero == len(bits) or len(low) < b or following >= end:
            return found, 1
        found.append(following)
        following += 1
        at = zero + 1 + b


def section_positions(section: Tensor, b: int, elements: int, value_bytes: int) -> tuple[np.ndarray, int]:
    """Return the positions of a section, and how many of its ranges are malformed."""
    raw, length = section.numpy().tobytes(), 1 << b + 11
    ranges = -(-elements // length)
    begin = value_bytes + 4 * ranges
    if len(raw) < begin:
        return np.zeros(0, dtype=np.int64), max(1, ranges)
    found: list[int] = []
    wrong = 0
    for index, size in enumerate(np.frombuffer(raw[value_bytes:begin], dtype="<u4").tolist()):
        if begin + size > len(raw):
            wrong += 1
        else:
            limit = min((index + 1) * length, elements)
            inside, malformed = _positions(raw[begin : begin + size], b, index * length, limit)
            found += inside
            wrong += malformed
        begin += size
    return np.array(found, dtype=np.int64), wrong


def _value(section: Tensor, dtype: np.dtype) -> np.ndarray:
    """Return the value of a section, 0 if it is too short to hold one."""
    raw = section.numpy().tobytes()[: dtype.itemsize]
    return np.frombuffer(raw.ljust(dtype.itemsize, b"\0"), dtype=dtype)[0]


@quiet
def binary_decode(
    sections: Sequence[Tensor], own: int, parameter: int, grad: Tensor, residual: Tensor | None, scale: float
) -> int:
    x = offered(grad, residual)
    total, wrong = np.zeros_like(x), 0
    for rank, section in enumerate(sections):
        positions, malformed = section_positions(section, parameter, x.size, x.itemsize)
        wrong += malformed
        value = _value(section, x.dtype)
        total[positions] += value
        if rank == own and residual is not None:
            x[positions] -= value
    if residual is not None:
        residual.numpy()[:] = x
    store(grad, total * x.dtype.type(scale))
    return wrong


def binary_clear(section: Tensor, b: int, tensor: Tensor) -> int:
    value_bytes = 8 if tensor.dtype is torch.float64 else 4
    positions, wrong = section_positions(section, b, tensor.numel(), value_bytes)
    tensor[torch.from_numpy(positions)] = 0
    return wrong


_FORMS = ("full", "float16", "bfloat16", "signs", "codes2", "codes4", "codes8")
_NARROW = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# ---- sections ---------------------------------------------------------------------------------


@quiet
def _rounded(x: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Round to a 16-bit type; what would be infinite becomes the largest number of its sign, NaN that without one."""
    narrow = torch.empty(x.size, dtype=dtype, device="cpu")
    store(narrow, x)
    most = torch.full((x.size,), torch.finfo(dtype).max, dtype=dtype, device="cpu")
    return torch.where(narrow.isfinite(), narrow, torch.where(torch.from_numpy(x < 0), -most, most))


def _coded(x: np.ndarray, form: str, head: bytes) -> bytes:
    """Return the bytes of the values of one range."""
    if form in CODE_BITS:
        width = CODE_BITS[form]
        codes = codes_of(x, np.frombuffer(head, dtype=np.float32), width)
        bits = codes[:, None] >> np.arange(width) & 1
        return np.packbits(bits.astype(np.uint8).reshape(-1), bitorder="little").tobytes()
    if form == "full":
        return x.tobytes()
    if form == "signs":
        return np.packbits(x < 0, bitorder="little").tobytes()
    return _rounded(x, _NARROW[form]).view(torch.uint8).numpy().tobytes()


def _values(raw: bytes, number: int, form: str, dtype: np.dtype, head: bytes) -> np.ndarray:
    """Return the values of one range."""
    if not number:
        return np.zeros(0, dtype=dtype)
    if form == "full":
        return np.frombuffer(raw, dtype=dtype)
    if form in CODE_BITS:
        width, levels = CODE_BITS[form], np.frombuffer(head, dtype=np.float32).astype(dtype)
        bits = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), bitorder="little")[: width * number]
        codes = (bits.reshape(-1, width).astype(np.int64) << np.arange(width)).sum(1)
        found = levels[codes & levels.size - 1]
        return np.where(codes >= levels.size, -found, found)
    if form == "signs":
        bits = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), bitorder="little")[:number]
        mean = np.frombuffer(head, dtype=dtype)[0]
        return np.where(bits == 1, -mean, mean).astype(dtype)
    narrow = torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy()).view(_NARROW[form])
    return load(narrow).astype(dtype)


def _value_bytes(number: int, form: str, dtype: np.dtype) -> int:
    if form in CODE_BITS:
        return -(-CODE_BITS[form] * number // 8)
    return {"full": number * dtype.itemsize, "signs": -(-number // 8)}.get(form, 2 * number)


def values_encode(
    positions: Tensor,
    kept: int,
    values: Tensor,
    head: Tensor | None,
    form: int,
    elements: int,
    parameter: int,
    ends: Tensor,
    out: Tensor,
) -> None:
    said = b"" if head is None else head.numpy().tobytes()
    _put(_section(positions, kept, parameter, elements, said, values.numpy()[:kept], _FORMS[form]), ends, out)


def section_values(
    section: Tensor, b: int, elements: int, form: str, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the positions and the values of a section, and how many of its ranges are malformed."""
    raw, length = section.numpy().tobytes(), 1 << b + 11
    number, head = (
        -(-elements // length),
        {"signs": dtype.itemsize}.get(form, 2 << CODE_BITS[form] if form in CODE_BITS else 0),
    )
    at = head + 8 * number
    if len(raw) < at:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=dtype), max(1, number)
    places, found, wrong = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=dtype)], 0
    for index, (size, values) in enumerate(np.frombuffer(raw[head:at], dtype="<u4").reshape(-1, 2).tolist()):
        stream, at = at, at + size + _value_bytes(values, form, dtype)
        if at > len(raw):
            wrong += 1
            continue
        end = min((index + 1) * length, elements)
        inside, malformed = _positions(raw[stream : stream + size], b, index * length, end)
        if malformed or len(inside) != values:
            wrong += 1
            continue
        places.append(np.array(inside, dtype=np.int64))
        found.append(_values(raw[stream + size : at], values, form, dtype, raw[:head]))
    return np.concatenate(places), np.concatenate(found), wrong


@quiet
def values_decode(
    sections: Sequence[Tensor],
    own: int,
    parameter: int,
    grad: Tensor,
    residual: Tensor | None,
    scale: float,
    form: int,
    momentum: Tensor | None,
    factor: float,
    masking: bool,
    decay: float,
    by_senders: bool,
) -> int:
    g, x = load(grad), offered(grad, residual)
    total, senders, wrong = np.zeros_like(x), np.zeros_like(x), 0
    for rank, section in enumerate(sections):
        positions, values, malformed = section_values(section, parameter, x.size, _FORMS[form], x.dtype)
        wrong += malformed
        total[positions] += values
        senders[positions] += 1
        if rank == own:
            sent, taken = positions, values
    if momentum is not None:
        m = x.dtype.type(factor)
        u = bounded(m * momentum.numpy() + g)
        u[sent] *= not masking
        u[sent] += 0.0
        x = bounded(x + m * u)
        x[sent] = m * u[sent]
        momentum.numpy()[:] = u
    else:
        x *= x.dtype.type(decay)
        x[sent] -= x.dtype.type(decay) * taken
    if residual is not None:
        residual.numpy()[:] = x
    if by_senders:
        total /= np.maximum(senders, 1)
    store(grad, total * x.dtype.type(scale))
    return wrong
