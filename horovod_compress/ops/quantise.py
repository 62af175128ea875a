"""The operations of QSGD: records, and sections of Elias codes.

Records and their codes are laid out as ``rules/qsgd.h`` says, sections as ``rules/elias.h`` says. Random
bits are drawn for elements as in :func:`.uniform_encode_all`. A block's norm is the largest ``|x|``
(``norm`` 0) or the root of the sum of squares (``norm`` 2), in float32 whatever the gradient is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import Counted, Counts, batch
from .keys import Key
from .legality import (
    REFERENCE,
    backend,
    check_apart,
    check_draws,
    check_one_of,
    check_parts,
    checked,
    checked_each,
    checked_room,
    checked_sections,
    counted,
    draw_stream,
    dtype_code,
    row_count,
)

__all__ = [
    "elias_bound",
    "elias_decode",
    "elias_encode",
    "qsgd_decode",
    "qsgd_decode_all",
    "qsgd_encode",
    "qsgd_encode_all",
    "qsgd_fold",
    "qsgd_record_bytes",
]

_ENCODE, _DECODE = batch("qsgd_encode"), batch("qsgd_decode")

#: Elements that may share a norm: a multiple of BLOCK_UNIT, so that the codes of a block are whole words.
BLOCK_UNIT, MOST_BLOCK = 64, 8192
#: Elements whose Elias codes share a stream.
ELIAS_RANGE = 8192
NORM_BYTES = 4

# ---- records ------------------------------------------------------------------------------------


def qsgd_record_bytes(bits: int, block: int) -> int:
    """Return the bytes of a record: the norm and the codes of a block."""
    check_shape(bits, block, 0)
    return NORM_BYTES + block * bits // 8


@Counted
def qsgd_encode_all(
    grads: Sequence[Tensor],
    records: Sequence[Tensor],
    key: Key,
    *,
    bits: int,
    block: int,
    norm: int,
    offsets: Sequence[int] | None = None,
) -> Counts:
    """Write a record for every block; return how many elements are not finite, which count as 0 in a norm.

    Args:
        records: uint8, :func:`qsgd_record_bytes` for each block.
        bits: of a code, 2 to 8; ``2 ** (bits - 1) - 1`` is the code of the norm.
        block: how many elements share a norm.
        offsets: which element of the stream the first one of each tensor is; None for 0.
    """
    check_shape(bits, block, norm)
    size = qsgd_record_bytes(bits, block)
    for grad, offset in zip(grads, offsets or (), strict=False):
        check_draws(offset, row_count(grad.numel(), block) * block)
    options = {"key": key, "bits": bits, "block": block, "norm": norm}
    return _ENCODE(
        (grads, offsets, records), ((bits, block, norm), key.words()), options, None, lambda n: -(-n // block) * size
    )


def qsgd_encode(
    grad: Tensor, records: Tensor, key: Key, *, bits: int, block: int, norm: int, offset: int = 0
) -> int | Tensor:
    """Do :func:`qsgd_encode_all` for one tensor."""
    return qsgd_encode_all.counts([grad], [records], key, bits=bits, block=block, norm=norm, offsets=[offset])[0]


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
    check_parts(parts)
    size, rest = divmod(out.numel(), qsgd_record_bytes(bits, block))
    if rest:
        raise ValueError(f"out must hold whole records of {qsgd_record_bytes(bits, block)} bytes, {rest} are left")
    out_at = checked("out", out, torch.uint8, out.numel(), device)
    parts_at = checked_each("parts", parts, torch.uint8, out.numel(), device)
    stream = draw_stream(key, offset, size * block)
    if REFERENCE:
        REFERENCE.qsgd_fold(parts, out, key, bits=bits, block=block, norm=norm, offset=offset)
    else:
        native.qsgd_fold(parts_at, len(parts), size, (bits, block, norm), stream, offset, out_at, launch)


def qsgd_decode_all(records: Sequence[Tensor], grads: Sequence[Tensor], *, bits: int, block: int, scale: float) -> None:
    """Write ``(code * scale) * norm`` over the gradients."""
    size = qsgd_record_bytes(bits, block)
    options = {"bits": bits, "block": block, "scale": scale}
    _DECODE((records, grads), ((bits, block, 0), scale), options, None, lambda n: -(-n // block) * size)


def qsgd_decode(records: Tensor, grad: Tensor, *, bits: int, block: int, scale: float) -> None:
    """Do :func:`qsgd_decode_all` for one tensor."""
    qsgd_decode_all([records], [grad], bits=bits, block=block, scale=scale)


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
    grad_at = checked("grad", grad, grad.dtype, count, device)
    out_at = checked_room("out", out, elias_bound(count, bits=bits, block=block), device)
    check_apart("out", out, "grad", grad)
    stream = draw_stream(key, offset, row_count(count, block) * block)
    if REFERENCE:
        used, bad = REFERENCE.elias_encode(grad, out, key, bits=bits, block=block, norm=norm, offset=offset)
    else:
        used, bad = native.elias_encode(grad_at, code, count, (bits, block, norm), stream, offset, out_at, 0, launch)
    return int(used), int(bad)


def elias_decode(sections: Sequence[Tensor], grad: Tensor, *, bits: int, block: int, scale: float) -> int | Tensor:
    """Write the sum of ``(level * scale) * norm`` over the sections, in their order, over ``grad``.

    Returns:
        The number of malformed ranges of all sections, a tensor on CUDA. If it is not 0, ``grad`` holds anything.
    """
    native, device, launch = backend(grad)
    count, code = grad.numel(), dtype_code("grad", grad)
    check_shape(bits, block, 0)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    sections_at = checked_sections(sections, device)
    if REFERENCE:
        return int(REFERENCE.elias_decode(sections, grad, bits=bits, block=block, scale=scale))
    arguments = (sections_at, len(sections_at), code, count, (bits, block, 0), scale, grad_at)
    return counted(native.elias_decode, arguments, device, launch)


# ---- legality -----------------------------------------------------------------------------------


def check_shape(bits: int, block: int, norm: int) -> None:
    """Refuse a form of QSGD's records that no kernel has."""
    if not 2 <= bits <= 8:
        raise ValueError(f"bits must be in [2, 8], got {bits}")
    if not BLOCK_UNIT <= block <= MOST_BLOCK or block % BLOCK_UNIT:
        raise ValueError(f"block must be a multiple of {BLOCK_UNIT}, at most {MOST_BLOCK}, got {block}")
    check_one_of("norm", norm, (0, 2))
