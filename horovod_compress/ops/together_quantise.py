"""Kernels of methods that quantise, for all tensors of a bucket at once; see :mod:`.together`."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .keys import Key
from .legality import (
    POWERS,
    REFERENCE,
    backend,
    check_apart,
    check_draws,
    check_lengths,
    check_levels,
    check_octaves,
    check_one_of,
    checked,
    checked_codes,
    dtype_code,
    row_count,
    work_dtype,
)
from .quantise import check_shape, qsgd_record_bytes

ORACLE: ModuleType | None = None
if REFERENCE:
    from .reference import quantise as ORACLE


def norm_offer_all(
    grads: Sequence[Tensor], norms: Sequence[Tensor], row_lengths: Sequence[int], *, power: int = 0
) -> Tensor:
    """Do :func:`.norm_offer` for several tensors; return the count of each."""
    number = len(grads)
    check_one_of("power", power, POWERS)
    check_lengths(number, norms=norms, row_lengths=row_lengths)
    if not number:
        return torch.zeros(0, dtype=torch.int64)
    native, device, launch = backend(grads[0])
    dtype, code = grads[0].dtype, dtype_code("grad", grads[0])
    kind, rows = torch.float64 if power else work_dtype(dtype), []
    for grad, norm, row_length in zip(grads, norms, row_lengths, strict=True):
        count = grad.numel()
        grad_at = checked("grad", grad, dtype, count, device)
        norms_at = checked("norms", norm, kind, row_count(count, row_length), device)
        check_apart("norms", norm, "grad", grad)
        rows.append((grad_at, count, row_length, norms_at))
    if ORACLE:
        found: Tensor = ORACLE.norm_offer_all(grads, norms, row_lengths, power=power)
        return found
    counts = torch.empty(number, dtype=torch.int64, device=grads[0].device)
    native.norm_offer_all(rows, code, power, counts.data_ptr(), launch)
    return counts


def moments_offer_all(
    grads: Sequence[Tensor], largest: Sequence[Tensor], squares: Sequence[Tensor], row_lengths: Sequence[int]
) -> Tensor:
    """Do :func:`.moments_offer` for several tensors; return the count of each."""
    number = len(grads)
    check_lengths(number, largest=largest, squares=squares, row_lengths=row_lengths)
    if not number:
        return torch.zeros(0, dtype=torch.int64)
    native, device, launch = backend(grads[0])
    dtype, code = grads[0].dtype, dtype_code("grad", grads[0])
    rows = []
    for grad, most, sums, row_length in zip(grads, largest, squares, row_lengths, strict=True):
        count = grad.numel()
        groups = row_count(count, row_length)
        grad_at = checked("grad", grad, dtype, count, device)
        largest_at = checked("largest", most, work_dtype(dtype), groups, device)
        squares_at = checked("squares", sums, torch.float64, groups, device)
        check_apart("largest", most, "grad", grad)
        check_apart("squares", sums, "grad", grad)
        rows.append((grad_at, count, row_length, largest_at, squares_at))
    if ORACLE:
        found: Tensor = ORACLE.moments_offer_all(grads, largest, squares, row_lengths)
        return found
    counts = torch.empty(number, dtype=torch.int64, device=grads[0].device)
    native.moments_offer_all(rows, code, counts.data_ptr(), launch)
    return counts


# ---- codes --------------------------------------------------------------------------------------

#: What a kernel takes of a tensor: addresses and numbers.
Row = tuple[int, ...]


def level_encode_all(
    grads: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    codes: Sequence[Tensor],
    key: Key,
    *,
    bits: int,
    levels: int,
    offsets: Sequence[int] | None = None,
    bounds: Sequence[Tensor] | None = None,
) -> None:
    """Do :func:`.level_encode` for several tensors.

    Args:
        offsets: of each tensor; None for 0.
        bounds: of each tensor; None for no bounds.
    """
    check_levels(bits, levels)
    check_lengths(len(grads), norms=norms, row_lengths=row_lengths, codes=codes, offsets=offsets, bounds=bounds)
    if not grads:
        return
    native, device, launch = backend(grads[0])
    code, rows = _to_encode(grads, norms, row_lengths, codes, bits, offsets, device)
    limits = [0] * len(rows)
    if bounds:
        sizes = [norm.numel() for norm in norms]
        limits = [checked("bounds", b, norms[0].dtype, size, device) for b, size in zip(bounds, sizes, strict=True)]
    if ORACLE:
        options = {"bits": bits, "levels": levels, "offsets": offsets, "bounds": bounds}
        ORACLE.level_encode_all(grads, norms, row_lengths, codes, key, **options)
        return
    bounded = [(*row, limit) for row, limit in zip(rows, limits, strict=True)]
    native.level_encode_all(bounded, code, bits, levels, key.words(), launch)


def level_decode_all(
    codes: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    grads: Sequence[Tensor],
    *,
    bits: int,
    scale: float,
) -> None:
    """Do :func:`.level_decode` for several tensors."""
    check_one_of("bits", bits, (4, 8, 16))
    check_lengths(len(grads), codes=codes, norms=norms, row_lengths=row_lengths)
    if not grads:
        return
    native, device, launch = backend(grads[0])
    code, rows = _to_decode(codes, norms, row_lengths, grads, bits, device)
    if ORACLE:
        ORACLE.level_decode_all(codes, norms, row_lengths, grads, bits=bits, scale=scale)
    else:
        native.level_decode_all(rows, bits, scale, code, launch)


def octave_encode_all(
    grads: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    codes: Sequence[Tensor],
    key: Key,
    *,
    bits: int,
    headroom: int,
    offsets: Sequence[int] | None = None,
) -> None:
    """Do :func:`.octave_encode` for several tensors.

    Args:
        offsets: of each tensor; None for 0.
    """
    check_octaves(bits, headroom)
    check_lengths(len(grads), norms=norms, row_lengths=row_lengths, codes=codes, offsets=offsets)
    if not grads:
        return
    native, device, launch = backend(grads[0])
    code, rows = _to_encode(grads, norms, row_lengths, codes, bits, offsets, device)
    if ORACLE:
        options = {"bits": bits, "headroom": headroom, "offsets": offsets}
        ORACLE.octave_encode_all(grads, norms, row_lengths, codes, key, **options)
    else:
        native.octave_encode_all(rows, code, bits, headroom, key.words(), launch)


def octave_decode_all(
    codes: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    grads: Sequence[Tensor],
    *,
    bits: int,
    headroom: int,
    scale: float,
) -> None:
    """Do :func:`.octave_decode` for several tensors."""
    check_octaves(bits, headroom)
    check_lengths(len(grads), codes=codes, norms=norms, row_lengths=row_lengths)
    if not grads:
        return
    native, device, launch = backend(grads[0])
    code, rows = _to_decode(codes, norms, row_lengths, grads, bits, device)
    if ORACLE:
        ORACLE.octave_decode_all(codes, norms, row_lengths, grads, bits=bits, headroom=headroom, scale=scale)
    else:
        native.octave_decode_all(rows, bits, headroom, scale, code, launch)


def _to_encode(
    grads: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    codes: Sequence[Tensor],
    bits: int,
    offsets: Sequence[int] | None,
    device: int,
) -> tuple[int, list[Row]]:
    """Check what is encoded; return its dtype's code and what the kernel takes."""
    code, rows = dtype_code("grad", grads[0]), list[Row]()
    for i, (grad, row_length) in enumerate(zip(grads, row_lengths, strict=True)):
        offset = offsets[i] if offsets else 0
        check_draws(offset, grad.numel())
        grad_at, norms_at, codes_at = _scaled(grad, norms[i], row_length, codes[i], bits, grads[0].dtype, device)
        rows.append((grad_at, norms_at, grad.numel(), row_length, offset, codes_at))
    return code, rows


def _to_decode(
    codes: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    grads: Sequence[Tensor],
    bits: int,
    device: int,
) -> tuple[int, list[Row]]:
    """Check what is decoded; return the dtype's code and what the kernel takes."""
    code, rows = dtype_code("grad", grads[0]), list[Row]()
    for grad, norm, row_length, sent in zip(grads, norms, row_lengths, codes, strict=True):
        grad_at, norms_at, codes_at = _scaled(grad, norm, row_length, sent, bits, grads[0].dtype, device)
        rows.append((codes_at, norms_at, grad.numel(), row_length, grad_at))
    return code, rows


def _scaled(
    grad: Tensor, norms: Tensor, row_length: int, codes: Tensor, bits: int, dtype: torch.dtype, device: int
) -> tuple[int, int, int]:
    """Return where a gradient, its norms and its codes are."""
    count = grad.numel()
    grad_at = checked("grad", grad, dtype, count, device)
    norms_at = checked("norms", norms, work_dtype(dtype), row_count(count, row_length), device)
    codes_at = checked_codes(codes, bits, count, row_length, device)
    check_apart("codes", codes, "grad", grad)
    return grad_at, norms_at, codes_at


# ---- QSGD's records -----------------------------------------------------------------------------


def qsgd_encode_all(
    grads: Sequence[Tensor],
    records: Sequence[Tensor],
    key: Key,
    *,
    bits: int,
    block: int,
    norm: int,
    offsets: Sequence[int] | None = None,
) -> Tensor:
    """Do :func:`.qsgd_encode` for several tensors; return the count of each.

    Args:
        offsets: of each tensor; None for 0.
    """
    number = len(grads)
    check_shape(bits, block, norm)
    check_lengths(number, records=records, offsets=offsets)
    if not number:
        return torch.zeros(0, dtype=torch.int64)
    native, device, launch = backend(grads[0])
    dtype, code, size = grads[0].dtype, dtype_code("grad", grads[0]), qsgd_record_bytes(bits, block)
    rows = []
    for i, (grad, into) in enumerate(zip(grads, records, strict=True)):
        count, offset = grad.numel(), offsets[i] if offsets else 0
        blocks = row_count(count, block)
        check_draws(offset, blocks * block)
        grad_at = checked("grad", grad, dtype, count, device)
        records_at = checked("records", into, torch.uint8, blocks * size, device)
        check_apart("records", into, "grad", grad)
        rows.append((grad_at, count, offset, records_at))
    if ORACLE:
        rule = {"bits": bits, "block": block, "norm": norm, "offsets": offsets}
        found: Tensor = ORACLE.qsgd_encode_all(grads, records, key, **rule)
        return found
    counts = torch.empty(number, dtype=torch.int64, device=grads[0].device)
    native.qsgd_encode_all(rows, code, bits, block, norm, key.words(), counts.data_ptr(), launch)
    return counts


def qsgd_decode_all(records: Sequence[Tensor], grads: Sequence[Tensor], *, bits: int, block: int, scale: float) -> None:
    """Do :func:`.qsgd_decode` for several tensors."""
    check_shape(bits, block, 0)
    check_lengths(len(grads), records=records)
    if not grads:
        return
    native, device, launch = backend(grads[0])
    dtype, code, size = grads[0].dtype, dtype_code("grad", grads[0]), qsgd_record_bytes(bits, block)
    rows = []
    for grad, sent in zip(grads, records, strict=True):
        count = grad.numel()
        grad_at = checked("grad", grad, dtype, count, device)
        records_at = checked("records", sent, torch.uint8, row_count(count, block) * size, device)
        check_apart("records", sent, "grad", grad)
        rows.append((records_at, count, grad_at))
    if ORACLE:
        ORACLE.qsgd_decode_all(records, grads, bits=bits, block=block, scale=scale)
    else:
        native.qsgd_decode_all(rows, code, bits, block, scale, launch)
