"""Kernels of methods that quantise: QSGD's records and sections, moments of a gradient, means of powers of two.

Records and their codes are laid out as ``hvc/qsgd.h`` says, sections as ``hvc/elias.h`` says. Random
bits are drawn for elements as in :func:`.level_encode`. A block's norm is the largest ``|x|``
(``norm`` 0) or the root of the sum of squares (``norm`` 2), in float32 whatever the gradient is.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .keys import Key
from .legality import (
    MAX_PARTS,
    REFERENCE,
    backend,
    check_apart,
    check_one_of,
    checked,
    counter_for,
    draw_stream,
    dtype_code,
    row_count,
    work_dtype,
)

ORACLE: ModuleType | None = None
if REFERENCE:
    from .reference import quantise as ORACLE

#: Elements that may share a norm: a multiple of BLOCK_UNIT, so that the codes of a block are whole words.
BLOCK_UNIT, MOST_BLOCK = 64, 8192
#: Elements whose Elias codes share a stream.
ELIAS_RANGE = 8192
NORM_BYTES = 4


def qsgd_record_bytes(bits: int, block: int) -> int:
    """Return the bytes of a record: the norm and the codes of a block."""
    check_shape(bits, block, 0)
    return NORM_BYTES + block * bits // 8


def qsgd_encode(
    grad: Tensor, records: Tensor, key: Key, *, bits: int, block: int, norm: int, offset: int = 0
) -> int | Tensor:
    """Write a record for every block; return how many elements are not finite, which count as 0 in a norm.

    Args:
        records: uint8, :func:`qsgd_record_bytes` for each block.
        bits: of a code, 2 to 8; ``2 ** (bits - 1) - 1`` is the code of the norm.
        block: how many elements share a norm.
        offset: which element of the stream ``grad[0]`` is.
    """
    native, device, launch = backend(grad)
    count, code = grad.numel(), dtype_code("grad", grad)
    check_shape(bits, block, norm)
    blocks = row_count(count, block)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    records_at = checked("records", records, torch.uint8, blocks * qsgd_record_bytes(bits, block), device)
    check_apart("records", records, "grad", grad)
    stream = draw_stream(key, offset, blocks * block)
    if ORACLE:
        return int(ORACLE.qsgd_encode(grad, records, key, bits=bits, block=block, norm=norm, offset=offset))
    counter, counter_at = counter_for(device)
    shape = (code, count, bits, block, norm)
    counted: int = native.qsgd_encode(grad_at, *shape, stream, offset, records_at, counter_at, launch)
    return counted if counter is None else counter


def qsgd_fold(
    parts: Sequence[Tensor],
    out: Tensor,
    key: Key,
    *,
    bits: int,
    block: int,
    norm: int,
    offset: int = 0,
) -> None:
    """Write records of the mean of some ranks' records, rounded again without bias.

    Numbers are added in the order of the list, in float32.

    Args:
        out: may be one of the parts.
        offset: which element of the stream the first one is.
    """
    native, device, launch = backend(out)
    check_shape(bits, block, norm)
    _check_parts(parts)
    size, rest = divmod(out.numel(), qsgd_record_bytes(bits, block))
    if rest:
        raise ValueError(f"out must hold whole records of {qsgd_record_bytes(bits, block)} bytes, {rest} are left")
    out_at = checked("out", out, torch.uint8, out.numel(), device)
    parts_at = [checked(f"parts[{i}]", part, torch.uint8, out.numel(), device) for i, part in enumerate(parts)]
    stream = draw_stream(key, offset, size * block)
    if ORACLE:
        ORACLE.qsgd_fold(parts, out, key, bits=bits, block=block, norm=norm, offset=offset)
    else:
        native.qsgd_fold(parts_at, size, bits, block, norm, stream, offset, out_at, launch)


def qsgd_decode(records: Tensor, grad: Tensor, *, bits: int, block: int, scale: float) -> None:
    """Write ``(code * scale) * norm`` over ``grad``."""
    native, device, launch = backend(grad)
    count, code = grad.numel(), dtype_code("grad", grad)
    check_shape(bits, block, 0)
    nbytes = row_count(count, block) * qsgd_record_bytes(bits, block)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    records_at = checked("records", records, torch.uint8, nbytes, device)
    check_apart("records", records, "grad", grad)
    if ORACLE:
        ORACLE.qsgd_decode(records, grad, bits=bits, block=block, scale=scale)
    else:
        native.qsgd_decode(records_at, code, count, bits, block, scale, grad_at, launch)


# ---- Elias codes --------------------------------------------------------------------------------


def elias_bound(count: int, *, bits: int, block: int) -> int:
    """Return the most bytes that the section of a tensor takes: ``2 * bits - 1`` bits for each element."""
    check_shape(bits, block, 0)
    length = max(1, ELIAS_RANGE // block) * block
    ranges, rest = divmod(count, length)
    streams = ranges * -(-(2 * bits - 1) * length // 8) + -(-(2 * bits - 1) * rest // 8)
    return 4 * row_count(count, length) + NORM_BYTES * row_count(count, block) + streams


def elias_encode(
    grad: Tensor, out: Tensor, key: Key, *, bits: int, block: int, norm: int, offset: int = 0
) -> tuple[int, int]:
    """Write a tensor's section; return its bytes, and how many elements are not finite. Waits for them on CUDA.

    Args:
        out: uint8, at least :func:`elias_bound` of them.
    """
    native, device, launch = backend(grad)
    count, code = grad.numel(), dtype_code("grad", grad)
    check_shape(bits, block, norm)
    bound = elias_bound(count, bits=bits, block=block)
    if out.numel() < bound:
        raise ValueError(f"out must hold at least {bound} bytes, got {out.numel()}")
    grad_at = checked("grad", grad, grad.dtype, count, device)
    out_at = checked("out", out, torch.uint8, out.numel(), device)
    check_apart("out", out, "grad", grad)
    stream = draw_stream(key, offset, row_count(count, block) * block)
    if ORACLE:
        used, bad = ORACLE.elias_encode(grad, out, key, bits=bits, block=block, norm=norm, offset=offset)
    else:
        used, bad = native.elias_encode(grad_at, code, count, bits, block, norm, stream, offset, out_at, launch)
    return int(used), int(bad)


def elias_decode(sections: Sequence[Tensor], grad: Tensor, *, bits: int, block: int, scale: float) -> int | Tensor:
    """Write the sum of ``(level * scale) * norm`` over the sections, in their order, over ``grad``.

    Returns:
        The number of malformed ranges of all sections, a tensor on CUDA. If it is not 0, ``grad`` holds anything.
    """
    native, device, launch = backend(grad)
    count, code = grad.numel(), dtype_code("grad", grad)
    check_shape(bits, block, 0)
    _check_parts(sections)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    sections_at = [
        (checked(f"sections[{i}]", section, torch.uint8, section.numel(), device), section.numel())
        for i, section in enumerate(sections)
    ]
    if ORACLE:
        return int(ORACLE.elias_decode(sections, grad, bits=bits, block=block, scale=scale))
    counter, counter_at = counter_for(device)
    counted: int = native.elias_decode(sections_at, code, count, bits, block, scale, grad_at, counter_at, launch)
    return counted if counter is None else counter


# ---- beside the kernels of dithering ------------------------------------------------------------


def moments_offer(grad: Tensor, largest: Tensor, squares: Tensor, row_length: int) -> int | Tensor:
    """Write the largest ``|x|`` and the sum of squares of every row; return how many elements are not finite.

    It is :func:`.norm_offer` with powers 0 and 2 in one pass.
    """
    native, device, launch = backend(grad)
    count, code = grad.numel(), dtype_code("grad", grad)
    rows = row_count(count, row_length)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    largest_at = checked("largest", largest, work_dtype(grad.dtype), rows, device)
    squares_at = checked("squares", squares, torch.float64, rows, device)
    check_apart("largest", largest, "grad", grad)
    check_apart("squares", squares, "grad", grad)
    if ORACLE:
        return int(ORACLE.moments_offer(grad, largest, squares, row_length))
    counter, counter_at = counter_for(device)
    counted: int = native.moments_offer(grad_at, code, count, row_length, largest_at, squares_at, counter_at, launch)
    return counted if counter is None else counter


def octave_fold(parts: Sequence[Tensor], out: Tensor, key: Key, *, headroom: int, offset: int = 0) -> None:
    """Write codes of the mean of some ranks' codes of :func:`.octave_encode`, rounded again without bias.

    Codes have 8 bits; numbers are added in the order of the list, in float32.

    Args:
        out: uint8; may be one of the parts.
        offset: which element of the stream the first one is.
    """
    native, device, launch = backend(out)
    count = out.numel()
    _check_parts(parts)
    if not 1 <= headroom <= 31:
        raise ValueError(f"headroom must be in [1, 31], got {headroom}")
    out_at = checked("out", out, torch.uint8, count, device)
    parts_at = [checked(f"parts[{i}]", part, torch.uint8, count, device) for i, part in enumerate(parts)]
    stream = draw_stream(key, offset, count)
    if ORACLE:
        ORACLE.octave_fold(parts, out, key, headroom=headroom, offset=offset)
    else:
        native.octave_fold(parts_at, count, headroom, stream, offset, out_at, launch)


# ---- legality -----------------------------------------------------------------------------------


def check_shape(bits: int, block: int, norm: int) -> None:
    """Refuse a form of QSGD's records that no kernel has."""
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be in [2, 8], got {bits}")
    if not BLOCK_UNIT <= block <= MOST_BLOCK or block % BLOCK_UNIT:
        raise ValueError(f"block must be a multiple of {BLOCK_UNIT}, at most {MOST_BLOCK}, got {block}")
    check_one_of("norm", norm, (0, 2))


def _check_parts(parts: Sequence[Tensor]) -> None:
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"there must be 1 to {MAX_PARTS} parts, got {len(parts)}")
