"""The kernels for signs with two values per row: one where the bit is 1, one where it is 0."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .legality import (
    MAX_PARTS,
    REFERENCE,
    backend,
    check_apart,
    check_lengths,
    checked,
    counter_for,
    dtype_code,
    row_count,
    word_count,
    work_dtype,
)


def points_offer(
    grad: Tensor, residual: Tensor | None, bits: Tensor, highs: Tensor, lows: Tensor, ones: Tensor, row_length: int
) -> int | Tensor:
    """Write the bits ``x >= 0`` of ``x = grad + residual``, and of every row what both sides add up to.

    Args:
        residual: float32 (float64 for float64 gradients), or None for zero.
        highs, lows: the sums of ``|x|`` where the bit is 1, and where it is 0; float64, one per
            ``row_length`` elements, summed in one fixed order.
        ones: how many bits are 1, int64, for the same rows.

    Returns:
        The number of elements of ``x`` that are not finite, or 2^96 or more of either sign.
    """
    native, device, launch = backend(grad)
    count = grad.numel()
    code = dtype_code("grad", grad)
    rows = row_count(count, row_length)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    bits_at = checked("bits", bits, torch.int64, word_count(count), device)
    sums_at = [checked(n, t, torch.float64, rows, device) for n, t in (("highs", highs), ("lows", lows))]
    ones_at = checked("ones", ones, torch.int64, rows, device)
    check_apart("highs", highs, "lows", lows)
    residual_at = 0
    if residual is not None:
        residual_at = checked("residual", residual, work_dtype(grad.dtype), count, device)
    if REFERENCE:
        return int(REFERENCE.points_offer(grad, residual, bits, highs, lows, ones, row_length))
    counter, counter_at = counter_for(device)
    given, outputs = (grad_at, residual_at, code, count, row_length), (bits_at, *sums_at, ones_at, counter_at)
    counted: int = native.points_offer(*given, *outputs, launch)
    return counted if counter is None else counter


def points_decode(
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
    """Write the sum of what all ranks sent times ``scale`` over ``grad``; keep what this rank did not send.

    A rank sent ``highs[row]`` where its bit is 1 and ``lows[row]`` where it is 0. Ranks are added in
    order. The residual becomes ``grad + residual`` minus what rank ``own`` sent.

    Args:
        highs, lows: of each rank, float32, one per ``row_length`` elements; without ``lows`` these
            are ``-highs``.
    """
    native, device, launch = backend(grad)
    ranks, count = len(bits), grad.numel()
    if not 1 <= ranks <= MAX_PARTS or not 0 <= own < ranks:
        raise ValueError(f"bits must hold 1 to {MAX_PARTS} tensors, {own} among them, got {ranks}")
    if len(highs) != ranks or (lows is not None and len(lows) != ranks):
        raise ValueError(f"highs and lows must hold {ranks} tensors, got {len(highs)} and {len(lows or ())}")
    code = dtype_code("grad", grad)
    rows, words = row_count(count, row_length), word_count(count)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    residual_at = checked("residual", residual, work_dtype(grad.dtype), count, device)
    check_apart("residual", residual, "grad", grad)
    bits_at = [checked(f"bits[{i}]", part, torch.int64, words, device) for i, part in enumerate(bits)]
    highs_at = [checked(f"highs[{i}]", part, torch.float32, rows, device) for i, part in enumerate(highs)]
    lows_at = [checked(f"lows[{i}]", part, torch.float32, rows, device) for i, part in enumerate(lows or ())]
    if REFERENCE:
        REFERENCE.points_decode(bits, highs, lows, row_length, own, grad, residual, scale=scale)
    else:
        shape = (own, code, count, row_length, scale)
        native.points_decode(bits_at, highs_at, lows_at, *shape, grad_at, residual_at, launch)


def points_offer_all(
    grads: Sequence[Tensor],
    residuals: Sequence[Tensor] | None,
    bits: Sequence[Tensor],
    highs: Sequence[Tensor],
    lows: Sequence[Tensor],
    ones: Sequence[Tensor],
    row_lengths: Sequence[int],
) -> Tensor:
    """Do :func:`points_offer` for all tensors of a bucket at once; return the count of each."""
    check_lengths(
        len(grads), residuals=residuals, bits=bits, highs=highs, lows=lows, ones=ones, row_lengths=row_lengths
    )
    if not grads:
        return torch.zeros(0, dtype=torch.int64)
    native, device, launch = backend(grads[0])
    dtype, code = grads[0].dtype, dtype_code("grad", grads[0])
    tensors = []
    for i, (grad, row_length) in enumerate(zip(grads, row_lengths, strict=True)):
        count = grad.numel()
        rows = row_count(count, row_length)
        grad_at = checked("grad", grad, dtype, count, device)
        residual_at = checked("residual", residuals[i], work_dtype(dtype), count, device) if residuals else 0
        bits_at = checked("bits", bits[i], torch.int64, word_count(count), device)
        sums_at = [checked(n, t[i], torch.float64, rows, device) for n, t in (("highs", highs), ("lows", lows))]
        ones_at = checked("ones", ones[i], torch.int64, rows, device)
        check_apart("highs", highs[i], "lows", lows[i])
        tensors.append((grad_at, residual_at, count, row_length, bits_at, *sums_at, ones_at))
    if REFERENCE:
        found: Tensor = REFERENCE.points_offer_all(grads, residuals, bits, highs, lows, ones, row_lengths)
        return found
    counts = torch.empty(len(grads), dtype=torch.int64, device=grads[0].device)
    native.points_offer_all(tensors, code, counts.data_ptr(), launch)
    return counts


def points_decode_all(
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
    """Do :func:`points_decode` for several tensors of a bucket.

    Args:
        bits, highs, lows: of each rank, for the whole bucket.
        first_words, first_rows: where each tensor's part of them begins.
    """
    number, ranks = len(grads), len(bits)
    if not 1 <= ranks <= MAX_PARTS or not 0 <= own < ranks:
        raise ValueError(f"bits must hold 1 to {MAX_PARTS} tensors, {own} among them, got {ranks}")
    if len(highs) != ranks or (lows is not None and len(lows) != ranks):
        raise ValueError(f"highs and lows must hold {ranks} tensors, got {len(highs)} and {len(lows or ())}")
    check_lengths(number, residuals=residuals, row_lengths=row_lengths, first_words=first_words, first_rows=first_rows)
    if not number:
        return
    native, device, launch = backend(grads[0])
    dtype, code = grads[0].dtype, dtype_code("grad", grads[0])
    words, rows = bits[0].numel(), highs[0].numel()
    bits_at = [checked(f"bits[{i}]", part, torch.int64, words, device) for i, part in enumerate(bits)]
    highs_at = [checked(f"highs[{i}]", part, torch.float32, rows, device) for i, part in enumerate(highs)]
    lows_at = [checked(f"lows[{i}]", part, torch.float32, rows, device) for i, part in enumerate(lows or ())]
    tensors = []
    for grad, residual, row_length, word, row in zip(
        grads, residuals, row_lengths, first_words, first_rows, strict=True
    ):
        count = grad.numel()
        grad_at = checked("grad", grad, dtype, count, device)
        residual_at = checked("residual", residual, work_dtype(dtype), count, device)
        check_apart("residual", residual, "grad", grad)
        _check_inside("words", word, word_count(count), words)
        _check_inside("rows", row, row_count(count, row_length), rows)
        tensors.append((count, row_length, word, row, grad_at, residual_at))
    if REFERENCE:
        places = {"first_words": first_words, "first_rows": first_rows}
        REFERENCE.points_decode_all(bits, highs, lows, row_lengths, own, grads, residuals, scale=scale, **places)
    else:
        native.points_decode_all(tensors, bits_at, highs_at, lows_at, own, code, scale, launch)


def _check_inside(what: str, first: int, number: int, size: int) -> None:
    if first < 0 or first + number > size:
        raise ValueError(f"a tensor's {what} must lie within the {size} of the bucket, got {first} + {number}")
