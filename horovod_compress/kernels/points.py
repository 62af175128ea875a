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
