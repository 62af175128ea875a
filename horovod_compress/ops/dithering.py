"""The operations of dithering: norms of rows, and codes on a scale that all ranks share.

Norms are float32, float64 for float64 gradients, one for each ``row_length`` elements, no less than any magnitude
there; 0 gives codes 0. 16 random bits decide how an element is rounded: the probability is right to 2**-17. Offsets say
which element of the key's stream the first one of a tensor is; None for 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .dispatch import Counted, Counts, batch
from .keys import Key
from .legality import (
    CODE_BITS,
    POWERS,
    REFERENCE,
    backend,
    check_apart,
    check_headroom,
    check_levels,
    check_one_of,
    check_parts,
    checked,
    checked_each,
    code_layout,
    draw_stream,
    work_dtype,
)

__all__ = [
    "exponential_decode",
    "exponential_decode_all",
    "exponential_encode",
    "exponential_encode_all",
    "exponential_fold",
    "exponential_merge",
    "moments_offer",
    "moments_offer_all",
    "norm_offer",
    "norm_offer_all",
    "uniform_add",
    "uniform_decode",
    "uniform_decode_all",
    "uniform_encode",
    "uniform_encode_all",
    "uniform_fold",
]

_NORM, _MOMENTS = batch("norm_offer"), batch("moments_offer")
_UNIFORM_ENCODE, _UNIFORM_DECODE = batch("uniform_encode"), batch("uniform_decode")
_EXPONENTIAL_ENCODE, _EXPONENTIAL_DECODE = batch("exponential_encode"), batch("exponential_decode")

# ---- norms --------------------------------------------------------------------------------------


@Counted
def norm_offer_all(
    grads: Sequence[Tensor], norms: Sequence[Tensor], row_lengths: Sequence[int], *, power: int = 0
) -> Counts:
    """Write the norm of every ``row_length`` elements; return how many elements are not finite.

    Those count as 0 in the norm.

    Args:
        norms: with ``power`` 0 the largest ``|x|``, float32 (float64 for float64 gradients); with
            1, 2 or 4 the sum of ``|x| ** power``, float64, summed in one fixed order.
    """
    check_one_of("power", power, POWERS)
    kind = torch.float64 if power or not grads else work_dtype(grads[0].dtype)
    return _NORM((grads, row_lengths, norms), (power,), {"power": power}, kind)


def norm_offer(grad: Tensor, norms: Tensor, row_length: int, *, power: int = 0) -> int | Tensor:
    """Do :func:`norm_offer_all` for one tensor."""
    return norm_offer_all.counts([grad], [norms], [row_length], power=power)[0]


@Counted
def moments_offer_all(
    grads: Sequence[Tensor], largest: Sequence[Tensor], squares: Sequence[Tensor], row_lengths: Sequence[int]
) -> Counts:
    """Write the largest ``|x|`` and the sum of squares of every row; return how many elements are not finite.

    It is :func:`norm_offer_all` with powers 0 and 2 in one pass.
    """
    return _MOMENTS((grads, row_lengths, largest, squares))


def moments_offer(grad: Tensor, largest: Tensor, squares: Tensor, row_length: int) -> int | Tensor:
    """Do :func:`moments_offer_all` for one tensor."""
    return moments_offer_all.counts([grad], [largest], [squares], [row_length])[0]


# ---- levels -------------------------------------------------------------------------------------


def uniform_encode_all(
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
    """Round ``grad / norm * levels`` to a whole number, up or down at random, without bias.

    A whole number stays what it is.

    Args:
        codes: see :func:`.code_layout`.
        levels: the code of the norm, below ``2 ** (bits - 1)``.
        bounds: like norms: a larger magnitude than this counts as this. None for no bounds.
    """
    check_levels(bits, levels)
    _check_rows(grads, row_lengths, bits)
    options = {"key": key, "bits": bits, "levels": levels}
    common, kind = (bits, levels, key.words()), code_layout(bits, 0)[0]
    _UNIFORM_ENCODE((grads, norms, row_lengths, offsets, codes, bounds), common, options, kind, partial(_codes, bits))


def uniform_encode(
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
    """Do :func:`uniform_encode_all` for one tensor."""
    given, limits = ([grad], [norms], [row_length], [codes], key), None if bounds is None else [bounds]
    uniform_encode_all(*given, bits=bits, levels=levels, offsets=[offset], bounds=limits)


def uniform_decode_all(
    codes: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    grads: Sequence[Tensor],
    *,
    bits: int,
    scale: float,
) -> None:
    """Write ``(code * scale) * norm`` over the gradients."""
    check_one_of("bits", bits, CODE_BITS)
    _check_rows(grads, row_lengths, bits)
    kind = code_layout(bits, 0)[0]
    options = {"bits": bits, "scale": scale}
    _UNIFORM_DECODE((codes, norms, row_lengths, grads), (bits, scale), options, kind, partial(_codes, bits))


def uniform_decode(codes: Tensor, norms: Tensor, row_length: int, grad: Tensor, *, bits: int, scale: float) -> None:
    """Do :func:`uniform_decode_all` for one tensor."""
    uniform_decode_all([codes], [norms], [row_length], [grad], bits=bits, scale=scale)


def uniform_add(into: Tensor, other: Tensor, *, bits: int) -> None:
    """Add codes of :func:`uniform_encode`, each modulo ``2 ** bits``; none carries into its neighbour."""
    native, device, launch = backend(into)
    check_one_of("bits", bits, (4, 8, 16))
    dtype, count = code_layout(16 if bits == 16 else 8, into.numel())
    into_at = checked("into", into, dtype, count, device)
    other_at = checked("other", other, dtype, count, device)
    check_apart("into", into, "other", other)
    if REFERENCE:
        REFERENCE.uniform_add(into, other, bits=bits)
    else:
        native.uniform_add(into_at, other_at, count, bits, launch)


def uniform_fold(parts: Sequence[Tensor], out: Tensor, count: int, *, bits: int, sum_bits: int) -> None:
    """Write the sums of some ranks' codes of :func:`uniform_encode`, in other widths.

    Sums that do not fit into ``sum_bits`` are wrong.

    Args:
        parts: codes of ``bits`` bits, 2 to 8; see :func:`.code_layout`.
        out: codes of ``sum_bits`` bits, 2 to 8; apart from the parts.
        count: how many codes there are.
    """
    native, device, launch = backend(out)
    check_parts(parts)
    for name, width in (("bits", bits), ("sum_bits", sum_bits)):
        check_one_of(name, width, CODE_BITS[:-1])
    out_at = checked("out", out, torch.uint8, _codes(sum_bits, count), device)
    parts_at = checked_each("parts", parts, torch.uint8, _codes(bits, count), device)
    for i, part in enumerate(parts):
        check_apart("out", out, f"parts[{i}]", part)
    if REFERENCE:
        REFERENCE.uniform_fold(parts, out, count, bits=bits, sum_bits=sum_bits)
    else:
        native.uniform_fold(parts_at, len(parts), count, bits, sum_bits, out_at, launch)


# ---- powers of two ------------------------------------------------------------------------------


def exponential_encode_all(
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
    """Round ``grad / norm`` to a power of two, up or down at random, without bias.

    A code is a sign (the top bit) and an exponent ``e``, for ``norm * 2 ** (headroom - e)``; 0 is
    zero.

    Args:
        bits: 8, or 4 with two codes to a byte.
        headroom: the exponent of the norm itself; sums may come down to 1.
    """
    check_headroom(bits, headroom)
    _check_rows(grads, row_lengths, bits)
    options = {"key": key, "bits": bits, "headroom": headroom}
    common = (bits, headroom, key.words())
    _EXPONENTIAL_ENCODE(
        (grads, norms, row_lengths, offsets, codes), common, options, torch.uint8, partial(_codes, bits)
    )


def exponential_encode(
    grad: Tensor, norms: Tensor, row_length: int, codes: Tensor, key: Key, *, bits: int, headroom: int, offset: int = 0
) -> None:
    """Do :func:`exponential_encode_all` for one tensor."""
    given = ([grad], [norms], [row_length], [codes], key)
    exponential_encode_all(*given, bits=bits, headroom=headroom, offsets=[offset])


def exponential_decode_all(
    codes: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    grads: Sequence[Tensor],
    *,
    bits: int,
    headroom: int,
    scale: float,
) -> None:
    """Write ``(+-2 ** (headroom - e) * scale) * norm`` over the gradients."""
    check_headroom(bits, headroom)
    _check_rows(grads, row_lengths, bits)
    options = {"bits": bits, "headroom": headroom, "scale": scale}
    columns = (codes, norms, row_lengths, grads)
    _EXPONENTIAL_DECODE(columns, (bits, headroom, scale), options, torch.uint8, partial(_codes, bits))


def exponential_decode(
    codes: Tensor, norms: Tensor, row_length: int, grad: Tensor, *, bits: int, headroom: int, scale: float
) -> None:
    """Do :func:`exponential_decode_all` for one tensor."""
    exponential_decode_all([codes], [norms], [row_length], [grad], bits=bits, headroom=headroom, scale=scale)


def exponential_merge(into: Tensor, other: Tensor, key: Key, *, bits: int, offset: int = 0) -> None:
    """Replace codes by codes of the sums, at random, without bias; see ``rules/exponential.h``.

    A number that is 2**16 or more times smaller than the other is dropped.

    Args:
        offset: which element of the stream the first code is.
    """
    native, device, launch = backend(into)
    check_one_of("bits", bits, (4, 8))
    count = into.numel()
    into_at = checked("into", into, torch.uint8, count, device)
    other_at = checked("other", other, torch.uint8, count, device)
    check_apart("into", into, "other", other)
    stream = draw_stream(key, offset, count * 8 // bits)
    if REFERENCE:
        REFERENCE.exponential_merge(into, other, key, bits=bits, offset=offset)
    else:
        native.exponential_merge(into_at, other_at, count, bits, stream, offset, launch)


def exponential_fold(parts: Sequence[Tensor], out: Tensor, key: Key, *, headroom: int, offset: int = 0) -> None:
    """Write codes of the mean of some ranks' codes of :func:`.exponential_encode`, rounded again without bias.

    Codes have 8 bits; numbers are added in the order of the list, in float32.

    Args:
        out: uint8; may be one of the parts.
        offset: which element of the stream the first one is.
    """
    native, device, launch = backend(out)
    count = out.numel()
    check_parts(parts)
    if not 1 <= headroom <= 31:
        raise ValueError(f"headroom must be in [1, 31], got {headroom}")
    out_at = checked("out", out, torch.uint8, count, device)
    parts_at = checked_each("parts", parts, torch.uint8, count, device)
    stream = draw_stream(key, offset, count)
    if REFERENCE:
        REFERENCE.exponential_fold(parts, out, key, headroom=headroom, offset=offset)
    else:
        native.exponential_fold(parts_at, len(parts), count, headroom, stream, offset, out_at, launch)


def _codes(bits: int, count: int) -> int:
    """Return the length of the array that holds the codes of a tensor."""
    return code_layout(bits, count)[1]


def _check_rows(grads: Sequence[Tensor], row_lengths: Sequence[int], bits: int) -> None:
    """Refuse rows that would share a byte."""
    unit = 8 // math.gcd(bits, 8)
    if unit == 1:
        return
    for grad, row_length in zip(grads, row_lengths, strict=True):
        if row_length % unit and row_length < grad.numel():
            raise ValueError(f"row_length must be a multiple of {unit} where codes share bytes, got {row_length}")
