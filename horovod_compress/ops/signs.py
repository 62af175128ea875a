"""The operations on signs, one bit for each element: with values for rows, merged, folded, and in records.

Counts, which are what shaped merges keep, are lists of rows: bit ``l`` of the count of every element is in row ``l``,
laid out as bits are. ``rules/shaped.h`` says what they mean; zeros stand for having rounded off nothing yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from .dispatch import Checked, Counts, run
from .keys import Key
from .legality import FEEDBACK, MAX_PARTS

__all__ = [
    "Feedback",
    "bernoulli_words",
    "majority_fold",
    "merge_bits",
    "record_decode",
    "record_fold",
    "record_offer",
    "shaped_fold",
    "shaped_merge",
    "sign_decode_all",
    "sign_offer_all",
    "sign_pack",
    "ternary_fold",
    "ternary_unpack",
    "two_value_decode_all",
    "two_value_offer_all",
]


Feedback = Literal["none", "global", "own", "momentum"]


# ---- with a step for each row -------------------------------------------------------------------


def sign_offer_all(
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    bits: Sequence[Tensor],
    steps: Sequence[Tensor] | None,
    row_lengths: Sequence[int],
    *,
    ranks: int = 1,
    scale: float = 1.0,
    key: Key | None = None,
    word_offsets: Sequence[int] | None = None,
    sums: Sequence[Tensor] | None = None,
    divisors: Sequence[Tensor] | None = None,
    checked_before: Checked | None = None,
) -> Counts:
    """Write the signs of ``x = grad / divisor + residual``, and what the ``|x|`` of every row come to.

    Args:
        residuals: float32 (float64 for float64 gradients) or bfloat16, or None for zero.
        steps: float32, one for each ``row_length`` elements: the mean of ``|x|`` there, divided by ``ranks`` and
            multiplied by ``scale``, each rounded to float32; None to skip.
        key: names the random bits that exact zeros get; None gives zeros the bit 1.
        word_offsets: which word of that stream the first one of each tensor is; None for 0.
        sums: float64, for the same rows: the sums of ``|x|``, in one fixed order; None to skip.
        divisors: float32 (float64 for float64 gradients), without zeros; None for 1.
        checked_before: what is remembered from call to call, where all columns but the gradients are tuples.

    Returns:
        The numbers of elements of ``x`` that are not finite, or 2^96 or more of either sign.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    columns = (grads, residuals, divisors, row_lengths, word_offsets, bits, steps, sums)
    return run.sign_offer(*columns, ranks=ranks, scale=scale, key=key, checked_before=checked_before)


def sign_decode_all(
    bits: Sequence[Tensor],
    steps: Sequence[Tensor],
    row_lengths: Sequence[int],
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    *,
    feedback: Feedback,
    decay: float = 1.0,
    scale: float = 1.0,
    key: Key | None = None,
    rounding: Key | None = None,
    word_offsets: Sequence[int] | None = None,
    zeros: Sequence[Tensor] | None = None,
    divisors: Sequence[Tensor] | None = None,
    checked_before: Checked | None = None,
) -> None:
    """Turn consensus bits into the result, in place over the gradients, and update the residuals.

    With ``G = +-steps[row]`` and ``x = grad / divisor + residual``, "global" feedback keeps ``x - G``, "own"
    keeps ``x`` minus the step with the sign that :func:`sign_offer_all` gave it under the same key,
    "momentum" keeps ``x`` itself, "none" keeps nothing. What is kept is multiplied by ``decay``. Then
    ``grad = G * scale * divisor``.

    Args:
        steps: float32, one for each ``row_length`` elements.
        rounding: names the random bits by which residuals of bfloat16 are rounded, right on average; else None.
        word_offsets: of each tensor; None for 0. They count for these, too.
        zeros: bits of the elements whose G is 0, whatever ``bits`` say; None for no such elements.
        divisors, checked_before: as for :func:`sign_offer_all`.
    """
    has_residual = residuals is not None
    if feedback not in FEEDBACK or (feedback == "none") == has_residual:
        raise ValueError(
            f'feedback must be "global", "own" or "momentum" with a residual, or "none" with residual None, '
            f"got {feedback!r} with {'a' if has_residual else 'no'} residual"
        )
    columns = (bits, zeros, steps, divisors, row_lengths, word_offsets, grads, residuals)
    rule = {"feedback": feedback, "decay": decay, "scale": scale}
    run.sign_decode(*columns, **rule, key=key, rounding=rounding, checked_before=checked_before)


# ---- with two values for each row ---------------------------------------------------------------


def two_value_offer_all(
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    bits: Sequence[Tensor],
    highs: Sequence[Tensor],
    lows: Sequence[Tensor],
    ones: Sequence[Tensor],
    row_lengths: Sequence[int],
) -> Counts:
    """Write the bits ``x >= 0`` of ``x = grad + residual``, and of every row what both sides add up to.

    Args:
        residuals: float32 (float64 for float64 gradients) or bfloat16, or None for zero.
        highs, lows: the sums of ``|x|`` where the bit is 1, and where it is 0; float64, one for each
            ``row_length`` elements, summed in one fixed order.
        ones: how many bits are 1, int64, for the same rows.

    Returns:
        The numbers of elements of ``x`` that are not finite, or 2^96 or more of either sign.
    """
    return run.two_value_offer(grads, residuals, row_lengths, bits, highs, lows, ones)


def two_value_decode_all(
    bits: Sequence[Tensor],
    highs: Sequence[Tensor],
    lows: Sequence[Tensor] | None,
    row_lengths: Sequence[int],
    own: int,
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor],
    *,
    first_words: Sequence[int],
    first_rows: Sequence[int],
    scale: float = 1.0,
    rounding: Key | None = None,
) -> None:
    """Write the sum of what all ranks sent times ``scale`` over the gradients; keep what this rank did not send.

    A rank sent ``highs[row]`` where its bit is 1 and ``lows[row]`` where it is 0. Ranks are added in
    order. The residual becomes ``grad + residual`` minus what rank ``own`` sent.

    Args:
        bits: of each rank, for all tensors.
        highs, lows: of each rank, for all tensors, float32, one for each ``row_length`` elements of
            one; without ``lows`` these are ``-highs``.
        first_words, first_rows: where each tensor's part of them begins.
        rounding: as for :func:`sign_decode_all`.
    """
    ranks = len(bits)
    if not 1 <= ranks <= MAX_PARTS or not 0 <= own < ranks:
        raise ValueError(f"bits must hold 1 to {MAX_PARTS} tensors, {own} among them, got {ranks}")
    if len(highs) != ranks or (lows is not None and len(lows) != ranks):
        raise ValueError(f"highs and lows must hold {ranks} tensors, got {len(highs)} and {len(lows or ())}")
    columns = (row_lengths, first_words, first_rows, grads, residuals, bits, highs, lows)
    run.two_value_decode(*columns, own=own, scale=scale, rounding=rounding)


# ---- bits alone ---------------------------------------------------------------------------------


def sign_pack(x: Tensor, bits: Tensor) -> None:
    """Write one bit per element: ``x >= 0``, so -0.0 gives 1 and NaN gives 0."""
    run.sign_pack(x, bits)


def merge_bits(
    into: Tensor,
    other: Tensor,
    weight_into: int,
    weight_other: int,
    key: Key,
    *,
    word_offset: int = 0,
) -> None:
    """Replace each bit of ``into`` by that of ``other`` with probability ``weight_other / total``.

    This is Marsit's operator: the result is an unbiased sample of the weighted signs, and where
    both sides agree it is what they agree on.
    """
    run.merge_bits(into, other, weight_into, weight_other, key, word_offset)


def bernoulli_words(out: Tensor, numerator: int, denominator: int, key: Key, *, word_offset: int = 0) -> None:
    """Draw bits that are 1 with probability ``numerator / denominator``, exact to 2**-64."""
    run.bernoulli_words(out, numerator, denominator, key, word_offset)


def majority_fold(parts: Sequence[Tensor], out: Tensor, count: int) -> None:
    """Write 1 where at least half of the parts hold 1, for ``count`` bits; may run in place."""
    run.majority_fold(parts, out, count)


# ---- what merging rounds off --------------------------------------------------------------------


def shaped_merge(into: Tensor, other: Tensor, before: Sequence[Tensor], after: Sequence[Tensor], ranks: int) -> None:
    """Merge the bits of one rank, ``into``, with ``other``, which stand for all other ``ranks - 1``.

    With signs +-1 and E for what is kept, ``y = (ranks - 1) * other + into + E``; the result is the sign of y, +1 for
    0, and what it differs from y by, ``y - ranks * result``, is kept.

    Args:
        before: the counts as they are, ``count_rows(ranks)`` rows or more, of which only these are used.
        after: where they are written; ``before`` itself, or rows apart from it.
    """
    run.shaped_merge(into, other, before, after, ranks)


def shaped_fold(parts: Sequence[Tensor], out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Merge the bits of all ranks at once; ``out`` may be one of the parts.

    With signs +-1 and E for what is kept, y is the sum of the parts and E; the result is the sign of y, +1 for 0, and
    ``y - ranks * result`` is kept; see :func:`shaped_merge`.
    """
    run.shaped_fold(parts, out, before, after)


def ternary_fold(parts: Sequence[Tensor], out: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Fold the bits of all ranks to -1, 0 or 1, packed.

    Words come in groups of five, and the three-valued elements of a group take eight: ``rules/ternary.h`` says how.

    With signs +-1 and E for what is kept, y is the sum of the parts and E; the result is the sign of y where y is at
    least half of ``ranks`` from 0, else 0, and ``y - ranks * result`` is kept.

    Args:
        parts: of at least two ranks, whole groups of words.
        before: the counts as they are, ``count_rows(ternary_states(ranks))`` rows or more.
        after: where they are written; ``before`` itself, or rows apart from it.
    """
    run.ternary_fold(parts, out, before, after)


def ternary_unpack(packed: Tensor, bits: Tensor, zeros: Tensor) -> None:
    """Write which elements are 0 or 1 to ``bits``, and which are 0 to ``zeros``; both are whole groups of words."""
    run.ternary_unpack(packed, bits, zeros)


# ---- records ------------------------------------------------------------------------------------

# Records are bytes, ``record_bytes(block)`` for each ``block`` elements, the last of which may be fewer;
# ``rules/record.h`` says how they are laid out. The rule of the scale is "l1" for the mean of ``|x|``, or "l2" for the
# root of the mean of ``x ** 2``; a fold has "shared" too, for the mean of the scales that it merges.


def record_offer(grad: Tensor, residual: Tensor | None, records: Tensor, block: int, *, rule: str) -> int | Tensor:
    """Write the records of ``x = grad + residual``, with the bits ``x >= 0``.

    Args:
        residual: float32 (float64 for float64 gradients), or None for zero.

    Returns:
        The number of elements of ``x`` that are not finite, or 2^96 or more of either sign.
    """
    return run.record_offer(grad, residual, records, block, rule)


def record_fold(parts: Sequence[Tensor], kept: Tensor, left: Tensor, out: Tensor, block: int, *, rule: str) -> None:
    """Write the records of ``x``, the mean of what the ranks' records say plus ``kept``, and what they lack.

    ``x`` is added up in the order of the ranks, then ``kept``; ``left`` becomes ``x`` minus its own
    record, 0 where that is not finite.

    Args:
        parts: records of all ranks, in rank order.
        kept, left: float32 or float64, one number for each element.
        out: may be one of the parts.
    """
    run.record_fold(parts, kept, left, out, block, rule)


def record_decode(
    records: Tensor, scales: Tensor, grad: Tensor, residual: Tensor, block: int, *, scale: float = 1.0
) -> None:
    """Write what records say times ``scale`` over the gradient; keep what this rank did not send.

    The residual becomes ``x = grad + residual`` minus the own scale of the block with the sign of x.

    Args:
        scales: float32, of this rank's own records.
    """
    run.record_decode(records, scales, grad, residual, block, scale)
