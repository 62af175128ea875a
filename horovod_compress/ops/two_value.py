"""The operations on signs with two values per row: one where the bit is 1, one where it is 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dispatch import Counted, Counts, batch
from .legality import MAX_PARTS, backend, checked_each, row_count, word_count

__all__ = ["two_value_decode", "two_value_decode_all", "two_value_offer", "two_value_offer_all"]

_OFFER, _DECODE = batch("two_value_offer"), batch("two_value_decode")


@Counted
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
        residuals: float32 (float64 for float64 gradients), or None for zero.
        highs, lows: the sums of ``|x|`` where the bit is 1, and where it is 0; float64, one for each
            ``row_length`` elements, summed in one fixed order.
        ones: how many bits are 1, int64, for the same rows.

    Returns:
        The numbers of elements of ``x`` that are not finite, or 2^96 or more of either sign.
    """
    columns = (grads, residuals, row_lengths, bits, highs, lows, ones)
    return _OFFER(columns)


def two_value_offer(
    grad: Tensor, residual: Tensor | None, bits: Tensor, highs: Tensor, lows: Tensor, ones: Tensor, row_length: int
) -> int | Tensor:
    """Do :func:`two_value_offer_all` for one tensor."""
    residuals = None if residual is None else [residual]
    return two_value_offer_all.counts([grad], residuals, [bits], [highs], [lows], [ones], [row_length])[0]


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
) -> None:
    """Write the sum of what all ranks sent times ``scale`` over the gradients; keep what this rank did not send.

    A rank sent ``highs[row]`` where its bit is 1 and ``lows[row]`` where it is 0. Ranks are added in
    order. The residual becomes ``grad + residual`` minus what rank ``own`` sent.

    Args:
        bits: of each rank, for all tensors.
        highs, lows: of each rank, for all tensors, float32, one for each ``row_length`` elements of
            one; without ``lows`` these are ``-highs``.
        first_words, first_rows: where each tensor's part of them begins.
    """
    ranks = len(bits)
    if not 1 <= ranks <= MAX_PARTS or not 0 <= own < ranks:
        raise ValueError(f"bits must hold 1 to {MAX_PARTS} tensors, {own} among them, got {ranks}")
    if len(highs) != ranks or (lows is not None and len(lows) != ranks):
        raise ValueError(f"highs and lows must hold {ranks} tensors, got {len(highs)} and {len(lows or ())}")
    if not grads:
        return
    _, device, _ = backend(grads[0])
    words, rows = bits[0].numel(), highs[0].numel()
    bits_at = checked_each("bits", bits, torch.int64, words, device)
    highs_at = checked_each("highs", highs, torch.float32, rows, device)
    lows_at = checked_each("lows", lows or (), torch.float32, rows, device)
    for grad, row_length, word, row in zip(grads, row_lengths, first_words, first_rows, strict=True):
        _check_inside("words", word, word_count(grad.numel()), words)
        _check_inside("rows", row, row_count(grad.numel(), row_length), rows)
    options = {"bits": bits, "highs": highs, "lows": lows, "own": own, "scale": scale}
    columns = (row_lengths, first_words, first_rows, grads, residuals)
    _DECODE(columns, (bits_at, highs_at, lows_at, ranks, own, scale), options)


def two_value_decode(
    bits: Sequence[Tensor],
    highs: Sequence[Tensor],
    lows: Sequence[Tensor] | None,
    row_length: int,
    own: int,
    grad: Tensor,
    residual: Tensor,
    *,
    scale: float = 1.0,
) -> None:
    """Do :func:`two_value_decode_all` for one tensor, of which all that was sent is the part."""
    given = (bits, highs, lows, [row_length], own, [grad], [residual])
    two_value_decode_all(*given, first_words=[0], first_rows=[0], scale=scale)


def _check_inside(what: str, first: int, number: int, size: int) -> None:
    if first < 0 or first + number > size:
        raise ValueError(f"a tensor's {what} must lie within the {size} of the bucket, got {first} + {number}")
