"""Signs with a scale for each block again, in slow and readable NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .lowrank import _lane_sums
from .numbers import offered, quiet, store, too_large

_SCALE_BYTES, _LARGEST = 4, float(np.finfo(np.float32).max)


def _scale(x: np.ndarray, rule: str) -> float:
    """Return the scale of a block."""
    sizes = np.abs(x).astype(np.float64)
    mean = _lane_sums(sizes * sizes if rule == "l2" else sizes) / x.size
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
