"""Kernels for all tensors of a bucket at once: on CUDA each is one launch, whatever the number of tensors.

What they write is what the kernels for one tensor write, tensor by tensor, bit for bit. The tensors of a call
are of one dtype and on one device, and share no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .keys import Key
from .legality import (
    REFERENCE,
    backend,
    check_apart,
    check_lengths,
    check_words,
    checked,
    dtype_code,
    row_count,
    word_count,
    work_dtype,
)

Feedback = Literal["none", "global", "own", "momentum"]

_FEEDBACK = {"none": 0, "global": 1, "own": 2, "momentum": 3}


def feedback_code(feedback: str, has_residual: bool) -> int:
    """Return the code of a residual rule."""
    rule = _FEEDBACK.get(feedback)
    if rule is None or (rule == 0) == has_residual:
        raise ValueError(
            f'feedback must be "global", "own" or "momentum" with a residual, or "none" with residual None, '
            f"got {feedback!r} with {'a' if has_residual else 'no'} residual"
        )
    return rule


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
) -> Tensor:
    """Do :func:`.sign_offer` for several tensors, with steps in the place of sums.

    Args:
        steps: float32, one per ``row_length`` elements: the mean of ``|x|`` there, divided by ``ranks``;
            None to skip.
        word_offsets: of each tensor; None for 0.

    Returns:
        The numbers of elements that cannot be taken in, one for each tensor.
    """
    number = len(grads)
    offsets = word_offsets or [0] * number
    check_lengths(number, residuals=residuals, bits=bits, steps=steps, row_lengths=row_lengths, word_offsets=offsets)
    if not number:
        return torch.zeros(0, dtype=torch.int64)
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    native, device, launch = backend(grads[0])
    dtype, code = grads[0].dtype, dtype_code("grad", grads[0])
    rows = []
    for i, (grad, row_length) in enumerate(zip(grads, row_lengths, strict=True)):
        count = grad.numel()
        words = word_count(count)
        groups = row_count(count, row_length)
        check_words(offsets[i], words)
        grad_at = checked("grad", grad, dtype, count, device)
        bits_at = checked("bits", bits[i], torch.int64, words, device)
        residual_at = checked("residual", residuals[i], work_dtype(dtype), count, device) if residuals else 0
        steps_at = checked("steps", steps[i], torch.float32, groups, device) if steps else 0
        rows.append((grad_at, residual_at, count, row_length, offsets[i], bits_at, steps_at))
    if REFERENCE:
        found: Tensor = REFERENCE.sign_offer_all(grads, residuals, bits, steps, row_lengths, ranks, key, offsets)
        return found
    counts = torch.empty(number, dtype=torch.int64, device=grads[0].device)
    native.sign_offer_all(rows, code, ranks, key and key.words(), counts.data_ptr(), launch)
    return counts


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
) -> None:
    """Do :func:`.sign_decode` for several tensors.

    Args:
        word_offsets: of each tensor; None for 0.
        zeros: bits of the elements whose result is 0, whatever ``bits`` say; None for no such elements.
    """
    number = len(grads)
    offsets = word_offsets or [0] * number
    lists = {"bits": bits, "steps": steps, "row_lengths": row_lengths, "residuals": residuals, "zeros": zeros}
    check_lengths(number, word_offsets=offsets, **lists)
    if not number:
        return
    native, device, launch = backend(grads[0])
    dtype, code, rule = grads[0].dtype, dtype_code("grad", grads[0]), feedback_code(feedback, residuals is not None)
    rows = []
    for i, (grad, row_length) in enumerate(zip(grads, row_lengths, strict=True)):
        count = grad.numel()
        words = word_count(count)
        groups = row_count(count, row_length)
        check_words(offsets[i], words)
        bits_at = checked("bits", bits[i], torch.int64, words, device)
        steps_at = checked("steps", steps[i], torch.float32, groups, device)
        grad_at = checked("grad", grad, dtype, count, device)
        residual_at = 0
        if residuals:
            residual_at = checked("residual", residuals[i], work_dtype(dtype), count, device)
            check_apart("residual", residuals[i], "grad", grad)
        zeros_at = checked("zeros", zeros[i], torch.int64, words, device) if zeros else 0
        rows.append((bits_at, zeros_at, steps_at, count, row_length, offsets[i], grad_at, residual_at))
    if REFERENCE:
        options = {"feedback": feedback, "decay": decay, "scale": scale, "key": key, "zeros": zeros}
        REFERENCE.sign_decode_all(bits, steps, row_lengths, grads, residuals, word_offsets=offsets, **options)
    else:
        native.sign_decode_all(rows, code, rule, decay, scale, key and key.words(), launch)


def dense_offer_all(grads: Sequence[Tensor], residuals: Sequence[Tensor] | None, outs: Sequence[Tensor]) -> Tensor:
    """Do :func:`.dense_offer` for several tensors, all to one dtype; return the count of each."""
    number = len(grads)
    check_lengths(number, residuals=residuals, outs=outs)
    if not number:
        return torch.zeros(0, dtype=torch.int64)
    native, device, launch = backend(grads[0])
    dtype, out_dtype = grads[0].dtype, outs[0].dtype
    codes = dtype_code("grad", grads[0]), dtype_code("out", outs[0])
    rows = []
    for i, (grad, out) in enumerate(zip(grads, outs, strict=True)):
        count = grad.numel()
        grad_at, out_at = checked("grad", grad, dtype, count, device), checked("out", out, out_dtype, count, device)
        residual_at = 0
        if residuals:
            residual_at = checked("residual", residuals[i], work_dtype(dtype), count, device)
            check_apart("out", out, "residual", residuals[i])
        check_apart("out", out, "grad", grad)
        rows.append((grad_at, residual_at, count, out_at))
    if REFERENCE:
        found: Tensor = REFERENCE.dense_offer_all(grads, residuals, outs)
        return found
    counts = torch.empty(number, dtype=torch.int64, device=grads[0].device)
    native.dense_offer_all(rows, *codes, counts.data_ptr(), launch)
    return counts


def dense_decode_all(
    payloads: Sequence[Tensor], grads: Sequence[Tensor], *, scale: float, residuals: Sequence[Tensor] | None = None
) -> None:
    """Do :func:`.dense_decode` for several tensors, all from one dtype."""
    number = len(grads)
    check_lengths(number, payloads=payloads, residuals=residuals)
    if not number:
        return
    native, device, launch = backend(grads[0])
    payload_dtype, dtype = payloads[0].dtype, grads[0].dtype
    code, grad_code = dtype_code("payload", payloads[0]), dtype_code("grad", grads[0])
    rows = []
    for i, (payload, grad) in enumerate(zip(payloads, grads, strict=True)):
        count = grad.numel()
        payload_at = checked("payload", payload, payload_dtype, count, device)
        grad_at = checked("grad", grad, dtype, count, device)
        check_apart("payload", payload, "grad", grad)
        residual_at = 0
        if residuals:
            residual_at = checked("residual", residuals[i], work_dtype(dtype), count, device)
            check_apart("residual", residuals[i], "grad", grad)
            check_apart("residual", residuals[i], "payload", payload)
        rows.append((payload_at, count, grad_at, residual_at))
    if REFERENCE:
        REFERENCE.dense_decode_all(payloads, grads, scale=scale, residuals=residuals)
    else:
        native.dense_decode_all(rows, code, scale, grad_code, launch)
