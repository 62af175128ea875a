"""The operations on signs, one bit for each element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .dispatch import Counted, Counts, batch
from .keys import Key
from .legality import (
    REFERENCE,
    backend,
    check_apart,
    check_odds,
    check_parts,
    checked,
    checked_each,
    dtype_code,
    word_count,
    word_stream,
)

__all__ = [
    "Feedback",
    "bernoulli_words",
    "majority_fold",
    "merge_bits",
    "sign_decode",
    "sign_decode_all",
    "sign_offer",
    "sign_offer_all",
    "sign_pack",
]

Feedback = Literal["none", "global", "own", "momentum"]

_FEEDBACK = {"none": 0, "global": 1, "own": 2, "momentum": 3}
_OFFER, _DECODE = batch("sign_offer"), batch("sign_decode")

# ---- with a step for each row -------------------------------------------------------------------


@Counted
def sign_offer_all(
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    bits: Sequence[Tensor],
    steps: Sequence[Tensor] | None,
    row_lengths: Sequence[int],
    *,
    ranks: int = 1,
    key: Key | None = None,
    word_offsets: Sequence[int] | None = None,
    sums: Sequence[Tensor] | None = None,
    divisors: Sequence[Tensor] | None = None,
) -> Counts:
    """Write the signs of ``x = grad / divisor + residual``, and what the ``|x|`` of every row come to.

    Args:
        residuals: float32 (float64 for float64 gradients), or None for zero.
        steps: float32, one for each ``row_length`` elements: the mean of ``|x|`` there, divided by ``ranks``;
            None to skip.
        key: names the random bits that exact zeros get; None gives zeros the bit 1.
        word_offsets: which word of that stream the first one of each tensor is; None for 0.
        sums: float64, for the same rows: the sums of ``|x|``, in one fixed order; None to skip.
        divisors: dtypes as of ``residuals``, without zeros; None for 1.

    Returns:
        The numbers of elements of ``x`` that are not finite, or 2^96 or more of either sign.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    columns = (grads, residuals, divisors, row_lengths, word_offsets, bits, steps, sums)
    return _OFFER(columns, (ranks, key and key.words()), {"ranks": ranks, "key": key})


def sign_offer(
    grad: Tensor,
    residual: Tensor | None,
    bits: Tensor,
    sums: Tensor | None,
    row_length: int,
    *,
    key: Key | None = None,
    word_offset: int = 0,
    divisor: Tensor | None = None,
) -> int | Tensor:
    """Do :func:`sign_offer_all` for one tensor, with sums."""
    residuals, of_rows = None if residual is None else [residual], None if sums is None else [sums]
    divisors = None if divisor is None else [divisor]
    given = ([grad], residuals, [bits], None, [row_length])
    return sign_offer_all.counts(*given, key=key, word_offsets=[word_offset], sums=of_rows, divisors=divisors)[0]


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
    word_offsets: Sequence[int] | None = None,
    zeros: Sequence[Tensor] | None = None,
    divisors: Sequence[Tensor] | None = None,
) -> None:
    """Turn consensus bits into the result, in place over the gradients, and update the residuals.

    With ``G = +-steps[row]`` and ``x = grad / divisor + residual``, "global" feedback keeps ``x - G``, "own"
    keeps ``x`` minus the step with the sign that :func:`sign_offer_all` gave it under the same key,
    "momentum" keeps ``x`` itself, "none" keeps nothing. What is kept is multiplied by ``decay``. Then
    ``grad = G * scale * divisor``.

    Args:
        steps: float32, one for each ``row_length`` elements.
        word_offsets: of each tensor; None for 0.
        zeros: bits of the elements whose G is 0, whatever ``bits`` say; None for no such elements.
        divisors: as for :func:`sign_offer_all`.
    """
    rule = _feedback_code(feedback, residuals is not None)
    options = {"feedback": feedback, "decay": decay, "scale": scale, "key": key}
    columns = (bits, zeros, steps, divisors, row_lengths, word_offsets, grads, residuals)
    _DECODE(columns, (rule, decay, scale, key and key.words()), options)


def sign_decode(
    bits: Tensor,
    steps: Tensor,
    row_length: int,
    grad: Tensor,
    residual: Tensor | None,
    *,
    feedback: Feedback,
    decay: float = 1.0,
    scale: float = 1.0,
    key: Key | None = None,
    word_offset: int = 0,
) -> None:
    """Do :func:`sign_decode_all` for one tensor."""
    given = ([bits], [steps], [row_length], [grad], None if residual is None else [residual])
    offsets = [word_offset]
    sign_decode_all(*given, feedback=feedback, decay=decay, scale=scale, key=key, word_offsets=offsets)


def _feedback_code(feedback: str, has_residual: bool) -> int:
    """Return the code of a residual rule."""
    rule = _FEEDBACK.get(feedback)
    if rule is None or (rule == 0) == has_residual:
        raise ValueError(
            f'feedback must be "global", "own" or "momentum" with a residual, or "none" with residual None, '
            f"got {feedback!r} with {'a' if has_residual else 'no'} residual"
        )
    return rule


# ---- bits alone ---------------------------------------------------------------------------------


def sign_pack(x: Tensor, bits: Tensor) -> None:
    """Write one bit per element: ``x >= 0``, so -0.0 gives 1 and NaN gives 0."""
    native, device, launch = backend(x)
    count = x.numel()
    code = dtype_code("x", x)
    x_at = checked("x", x, x.dtype, count, device)
    bits_at = checked("bits", bits, torch.int64, word_count(count), device)
    if REFERENCE:
        REFERENCE.sign_pack(x, bits)
    else:
        native.sign_pack(x_at, code, count, bits_at, launch)


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
    native, device, launch = backend(into)
    words = into.numel()
    total = weight_into + weight_other
    check_odds(weight_other, total)
    into_at = checked("into", into, torch.int64, words, device)
    other_at = checked("other", other, torch.int64, words, device)
    check_apart("into", into, "other", other)
    stream = word_stream(key, word_offset, words)
    if REFERENCE:
        REFERENCE.merge_bits(into, other, weight_into, weight_other, key, word_offset=word_offset)
    else:
        native.merge_bits(into_at, other_at, words, weight_other, total, stream, word_offset, launch)


def bernoulli_words(out: Tensor, numerator: int, denominator: int, key: Key, *, word_offset: int = 0) -> None:
    """Draw bits that are 1 with probability ``numerator / denominator``, exact to 2**-64."""
    native, device, launch = backend(out)
    words = out.numel()
    check_odds(numerator, denominator)
    out_at = checked("out", out, torch.int64, words, device)
    stream = word_stream(key, word_offset, words)
    if REFERENCE:
        REFERENCE.bernoulli_words(out, numerator, denominator, key, word_offset=word_offset)
    else:
        native.bernoulli_words(out_at, words, numerator, denominator, stream, word_offset, launch)


def majority_fold(parts: Sequence[Tensor], out: Tensor, count: int) -> None:
    """Write 1 where at least half of the parts hold 1, for ``count`` bits; may run in place."""
    check_parts(parts)
    native, device, launch = backend(out)
    words = word_count(count)
    out_at = checked("out", out, torch.int64, words, device)
    parts_at = checked_each("parts", parts, torch.int64, words, device)
    if REFERENCE:
        REFERENCE.majority_fold(parts, out, count)
    else:
        native.majority_fold(parts_at, len(parts), count, out_at, launch)
