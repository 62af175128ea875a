"""The operations of rounding at random: norms of rows, codes on a scale, records and sections of QSGD.

Norms are float32, float64 for float64 gradients, one for each ``row_length`` elements, no less than any magnitude
there; 0 gives codes 0. 16 random bits decide how an element is rounded: the probability is right to 2**-17. Offsets say
which element of the key's stream the first one of a tensor is; None for 0. Without a key, where it may be None,
elements are rounded to the nearest level.

QSGD's records and their codes are laid out as ``rules/qsgd.h`` says, sections as ``rules/elias.h`` says. A block's norm
is the largest ``|x|`` (``norm`` 0) or the root of the sum of squares (``norm`` 2), in float32 whatever the gradient is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from .dispatch import Counts, run
from .keys import Key
from .legality import CODE_BITS, POWERS, WORK_DTYPES, check_headroom, check_levels, check_one_of
from .sizes import check_blocks

__all__ = [
    "count_nonfinite",
    "elias_decode",
    "elias_encode",
    "exponential_decode_all",
    "exponential_encode_all",
    "exponential_fold",
    "exponential_merge",
    "loco_encode_all",
    "loco_fold",
    "moments_offer_all",
    "norm_offer_all",
    "qsgd_decode_all",
    "qsgd_encode_all",
    "qsgd_fold",
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
    run.exponential_encode(grads, norms, row_lengths, offsets, codes, key=key, bits=bits, headroom=headroom)


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
    run.exponential_decode(codes, norms, row_lengths, grads, bits=bits, headroom=headroom, scale=scale)


def exponential_merge(into: Tensor, other: Tensor, key: Key, *, bits: int, offset: int = 0) -> None:
    """Replace codes by codes of the sums, at random, without bias; see ``rules/exponential.h``.

    A number that is 2**16 or more times smaller than the other is dropped.

    Args:
        offset: which element of the stream the first code is.
    """
    check_one_of("bits", bits, (4, 8))
    run.exponential_merge(into, other, key, bits, offset)


def exponential_fold(parts: Sequence[Tensor], out: Tensor, key: Key, *, headroom: int, offset: int = 0) -> None:
    """Write codes of the mean of some ranks' codes of :func:`exponential_encode_all`, rounded again without bias.

    Codes have 8 bits; numbers are added in the order of the list, in float32.

    Args:
        out: uint8; may be one of the parts.
        offset: which element of the stream the first one is.
    """
    if not 1 <= headroom <= 31:
        raise ValueError(f"headroom must be in [1, 31], got {headroom}")
    run.exponential_fold(parts, out, key, headroom, offset)


def _check_rows(grads: Sequence[Tensor], row_lengths: Sequence[int], bits: int) -> None:
    """Refuse rows that would share a byte."""
    unit = 8 // math.gcd(bits, 8)
    if unit == 1:
        return
    for grad, row_length in zip(grads, row_lengths, strict=True):
        if row_length % unit and row_length < grad.numel():
            raise ValueError(f"row_length must be a multiple of {unit} where codes share bytes, got {row_length}")


# ---- records ------------------------------------------------------------------------------------


def qsgd_encode_all(
    grads: Sequence[Tensor],
    records: Sequence[Tensor],
    key: Key | None,
    *,
    bits: int,
    block: int,
    norm: int,
    offsets: Sequence[int] | None = None,
) -> Counts:
    """Write a record for every block; return how many elements are not finite, which count as 0 in a norm.

    Args:
        records: uint8, :func:`.sizes.qsgd_record_bytes` for each block.
        bits: of a code, 2 to 8; ``2 ** (bits - 1) - 1`` is the code of the norm.
        block: how many elements share a norm.
        offsets: which element of the stream the first one of each tensor is; None for 0.
    """
    check_blocks(bits, block, norm)
    return run.qsgd_encode(grads, offsets, records, key=key, bits=bits, block=block, norm=norm)


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
    check_blocks(bits, block, norm)
    run.qsgd_fold(parts, out, key, bits, block, norm, offset)


def qsgd_decode_all(records: Sequence[Tensor], grads: Sequence[Tensor], *, bits: int, block: int, scale: float) -> None:
    """Write ``(code * scale) * norm`` over the gradients."""
    run.qsgd_decode(records, grads, bits=bits, block=block, scale=scale)


# ---- records of LoCo ----------------------------------------------------------------------------


def loco_encode_all(
    grads: Sequence[Tensor],
    kept: Sequence[Tensor] | None,
    records: Sequence[Tensor],
    left: Sequence[Tensor],
    *,
    bits: int,
    block: int,
    norm: int,
    kept_bits: int,
    beta: float,
) -> Counts:
    """Write a record for every block of gradient and what was kept, to the nearest level, and what is kept of that now.

    That is ``beta * kept + (1 - beta) * (gradient + kept - what the codes stand for)``: see ``rules/loco.h``.

    Args:
        kept: uint8, records of ``kept_bits`` with the largest magnitude as the norm; None for zeros.
        records: uint8, :func:`.sizes.qsgd_record_bytes` for each block.
        left: like ``kept``, apart from it.

    Returns:
        How many elements of gradient and what was kept are not finite.
    """
    _check_kept(bits, block, norm, kept_bits, beta)
    return run.loco_encode(
        grads, kept, records, left, bits=bits, block=block, norm=norm, kept_bits=kept_bits, beta=beta
    )


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
    """Write records of the mean of some ranks' records and what was kept, and what is kept of that now.

    Args:
        kept: as for :func:`loco_encode_all`, of all blocks.
        out: may be one of the parts.
        left: like ``kept``, apart from it.
    """
    _check_kept(bits, block, norm, kept_bits, beta)
    run.loco_fold(parts, kept, out, left, bits, block, norm, kept_bits, beta)


def _check_kept(bits: int, block: int, norm: int, kept_bits: int, beta: float) -> None:
    check_blocks(bits, block, norm)
    check_blocks(kept_bits, block, 0)
    if not 0 <= beta < 1:
        raise ValueError(f"beta must be in [0, 1), got {beta}")


# ---- Elias codes --------------------------------------------------------------------------------


def elias_encode(
    grad: Tensor, place: Tensor, out: Tensor, key: Key, *, bits: int, block: int, norm: int, offset: int = 0
) -> int | Tensor:
    """Write a tensor's section; return how many elements are not finite, a tensor on CUDA.

    Args:
        place: int64, two: where the section begins in ``out``; and where it ends, which is written. That is -1 where
            it begins at -1, and on CUDA if there is no room; then nothing that was written counts.
        out: uint8, from there on at least :func:`.sizes.elias_bound` of them.
    """
    check_blocks(bits, block, norm)
    return run.elias_encode(grad, place, out, key, bits, block, norm, offset)


def elias_decode(sections: Sequence[Tensor], grad: Tensor, *, bits: int, block: int, scale: float) -> int | Tensor:
    """Write the sum of ``(level * scale) * norm`` over the sections, in their order, over ``grad``.

    Returns:
        The number of malformed ranges of all sections, a tensor on CUDA. If it is not 0, ``grad`` holds anything.
    """
    check_blocks(bits, block, 0)
    return run.elias_decode(sections, grad, bits, block, scale)
