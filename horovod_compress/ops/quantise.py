"""The operations of rounding at random: norms of rows, and codes on a scale.

Norms are float32, float64 for float64 gradients, one for each ``row_length`` elements, no less than any magnitude
there; 0 gives codes 0. 16 random bits decide how an element is rounded: the probability is right to 2**-17. Offsets say
which element of the key's stream the first one of a tensor is; None for 0. Without a key, where it may be None,
elements are rounded to the nearest level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .dispatch import Counts, run
from .keys import Key
from .legality import CODE_BITS, POWERS, WORK_DTYPES, check_headroom, check_levels, check_one_of

__all__ = [
    "count_nonfinite",
    "exponential_decode_all",
    "exponential_encode_all",
    "exponential_fold",
    "exponential_merge",
    "moments_offer_all",
    "norm_offer_all",
    "uniform_add",
    "uniform_decode_all",
    "uniform_encode_all",
    "uniform_fold",
]


# ---- norms --------------------------------------------------------------------------------------


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
    return run.norm_offer(grads, row_lengths, norms, power=power)


def moments_offer_all(
    grads: Sequence[Tensor], largest: Sequence[Tensor], squares: Sequence[Tensor], row_lengths: Sequence[int]
) -> Counts:
    """Write the largest ``|x|`` and the sum of squares of every row; return how many elements are not finite.

    It is :func:`norm_offer_all` with powers 0 and 2 in one pass.
    """
    return run.moments_offer(grads, row_lengths, largest, squares)


def count_nonfinite(grad: Tensor) -> int | Tensor:
    """Return how many elements are not finite."""
    rows = max(grad.numel(), 1)
    norms = grad.new_empty(min(grad.numel(), 1), dtype=WORK_DTYPES.get(grad.dtype, grad.dtype))
    return norm_offer_all([grad], [norms], [rows])[0]


# ---- levels -------------------------------------------------------------------------------------


def uniform_encode_all(
    grads: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    codes: Sequence[Tensor],
    key: Key | None,
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
    run.uniform_encode(grads, norms, row_lengths, offsets, codes, bounds, key=key, bits=bits, levels=levels)


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
    run.uniform_decode(codes, norms, row_lengths, grads, bits=bits, scale=scale)


def uniform_add(into: Tensor, other: Tensor, *, bits: int) -> None:
    """Add codes of :func:`uniform_encode_all`, each modulo ``2 ** bits``; none carries into its neighbour."""
    check_one_of("bits", bits, (4, 8, 16))
    run.uniform_add(into, other, bits)


def uniform_fold(parts: Sequence[Tensor], out: Tensor, count: int, *, bits: int, sum_bits: int) -> None:
    """Write the sums of some ranks' codes of :func:`uniform_encode_all`, in other widths.

    Sums that do not fit into ``sum_bits`` are wrong.

    Args:
        parts: codes of ``bits`` bits, 2 to 8; see :func:`.code_layout`.
        out: codes of ``sum_bits`` bits, 2 to 8; apart from the parts.
        count: how many codes there are.
    """
    check_one_of("bits", bits, CODE_BITS[:-1])
    check_one_of("sum_bits", sum_bits, CODE_BITS[:-1])
    run.uniform_fold(parts, out, count, bits, sum_bits)


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
    mantissa: int = 0,
    offsets: Sequence[int] | None = None,
) -> None:
    """Round ``grad / norm`` to a power of two, up or down at random, without bias.

    A code is a sign (the top bit) and an exponent ``e``, for ``norm * 2 ** (headroom - e)``; 0 is
    zero.

    Args:
        bits: 8, or 4 with two codes to a byte.
        headroom: the exponent of the norm itself; sums may come down to 1.
        mantissa: 2 for four evenly spaced levels from each power of two on, with 8 bits; ``e`` then counts levels.
    """
    check_headroom(bits, headroom, mantissa)
    _check_rows(grads, row_lengths, bits)
    rule = {"bits": bits, "headroom": headroom, "mantissa": mantissa}
    run.exponential_encode(grads, norms, row_lengths, offsets, codes, key=key, **rule)


def exponential_decode_all(
    codes: Sequence[Tensor],
    norms: Sequence[Tensor],
    row_lengths: Sequence[int],
    grads: Sequence[Tensor],
    *,
    bits: int,
    headroom: int,
    scale: float,
    mantissa: int = 0,
) -> None:
    """Write the numbers of :func:`exponential_encode_all`, times ``scale``, over the gradients."""
    check_headroom(bits, headroom, mantissa)
    _check_rows(grads, row_lengths, bits)
    rule = {"bits": bits, "headroom": headroom, "mantissa": mantissa}
    run.exponential_decode(codes, norms, row_lengths, grads, **rule, scale=scale)


def exponential_merge(into: Tensor, other: Tensor, key: Key, *, bits: int, offset: int = 0) -> None:
    """Replace codes by codes of the sums, at random, without bias; see ``rules/exponential.h``.

    A number that is 2**16 or more times smaller than the other is dropped.

    Args:
        offset: which element of the stream the first code is.
    """
    check_one_of("bits", bits, (4, 8))
    run.exponential_merge(into, other, key, bits, offset)


def exponential_fold(
    parts: Sequence[Tensor], out: Tensor, key: Key, *, headroom: int, mantissa: int = 0, offset: int = 0
) -> None:
    """Write codes of the mean of some ranks' codes of :func:`exponential_encode_all`, rounded again without bias.

    Codes have 8 bits; numbers are added in the order of the list, in float32.

    Args:
        out: uint8; may be one of the parts.
        offset: which element of the stream the first one is.
    """
    check_headroom(8, headroom, mantissa)
    run.exponential_fold(parts, out, key, headroom, mantissa, offset)


def _check_rows(grads: Sequence[Tensor], row_lengths: Sequence[int], bits: int) -> None:
    """Refuse rows that would share a byte."""
    unit = 8 // math.gcd(bits, 8)
    if unit == 1:
        return
    for grad, row_length in zip(grads, row_lengths, strict=True):
        if row_length % unit and row_length < grad.numel():
            raise ValueError(f"row_length must be a multiple of {unit} where codes share bytes, got {row_length}")
