"""The kernels for records: a float32 scale for a block of elements, and a sign for each of them.

Records are bytes, ``record_bytes(block)`` for each ``block`` elements, the last of which may be fewer;
``rules/record.h`` says how they are laid out. The rule of the scale is "l1" for the mean of ``|x|``, or
"l2" for the root of the mean of ``x ** 2``; a fold has "shared" too, for the mean of the scales that it merges.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .legality import (
    REFERENCE,
    backend,
    check_all_apart,
    check_apart,
    check_parts,
    checked,
    checked_or_none,
    counted,
    dtype_code,
    work_dtype,
)

__all__ = ["RECORD_UNIT", "record_bytes", "record_decode", "record_fold", "record_offer"]

#: Blocks are multiples of this many elements, so that records are whole 32-bit words.
RECORD_UNIT = 64
_RULES = {"l1": 0, "l2": 1}
_FOLD_RULES = {**_RULES, "shared": 2}


def record_bytes(block: int) -> int:
    """Return the bytes of one record."""
    if block < RECORD_UNIT or block % RECORD_UNIT:
        raise ValueError(f"block must be a multiple of {RECORD_UNIT}, got {block}")
    return 4 + block // 8


def record_offer(grad: Tensor, residual: Tensor | None, records: Tensor, block: int, *, rule: str) -> int | Tensor:
    """Write the records of ``x = grad + residual``, with the bits ``x >= 0``.

    Args:
        residual: float32 (float64 for float64 gradients), or None for zero.

    Returns:
        The number of elements of ``x`` that are not finite, or 2^96 or more of either sign.
    """
    native, device, launch = backend(grad)
    count, number = grad.numel(), _number(rule, _RULES)
    code = dtype_code("grad", grad)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    residual_at = checked_or_none("residual", residual, work_dtype(grad.dtype), count, device)
    records_at = _checked_records("records", records, count, block, device)
    check_all_apart({"records": records}, {"grad": grad, "residual": residual})
    if REFERENCE:
        return int(REFERENCE.record_offer(grad, residual, records, block, rule=rule))
    return counted(native.record_offer, (grad_at, residual_at, code, count, block, number, records_at), device, launch)


def record_fold(parts: Sequence[Tensor], kept: Tensor, left: Tensor, out: Tensor, block: int, *, rule: str) -> None:
    """Write the records of ``x``, the mean of what the ranks' records say plus ``kept``, and what they lack.

    ``x`` is added up in the order of the ranks, then ``kept``; ``left`` becomes ``x`` minus its own
    record, 0 where that is not finite.

    Args:
        parts: records of all ranks, in rank order.
        kept, left: float32 or float64, one number for each element.
        out: may be one of the parts.
    """
    native, device, launch = backend(kept)
    count, number = kept.numel(), _number(rule, _FOLD_RULES)
    check_parts(parts)
    if kept.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"kept must be float32 or float64, got {kept.dtype}")
    code = dtype_code("kept", kept)
    kept_at = checked("kept", kept, kept.dtype, count, device)
    left_at = checked("left", left, kept.dtype, count, device)
    out_at = _checked_records("out", out, count, block, device)
    parts_at = [_checked_records(f"parts[{i}]", part, count, block, device) for i, part in enumerate(parts)]
    check_apart("left", left, "kept", kept)
    if REFERENCE:
        REFERENCE.record_fold(parts, kept, left, out, block, rule=rule)
    else:
        native.record_fold(parts_at, len(parts), code, count, block, number, kept_at, left_at, out_at, launch)


def record_decode(
    records: Tensor, scales: Tensor, grad: Tensor, residual: Tensor, block: int, *, scale: float = 1.0
) -> None:
    """Write what records say times ``scale`` over the gradient; keep what this rank did not send.

    The residual becomes ``x = grad + residual`` minus the own scale of the block with the sign of x.

    Args:
        scales: float32, of this rank's own records.
    """
    native, device, launch = backend(grad)
    count = grad.numel()
    code = dtype_code("grad", grad)
    records_at = _checked_records("records", records, count, block, device)
    scales_at = checked("scales", scales, torch.float32, -(-count // block), device)
    grad_at = checked("grad", grad, grad.dtype, count, device)
    residual_at = checked("residual", residual, work_dtype(grad.dtype), count, device)
    check_apart("residual", residual, "grad", grad)
    if REFERENCE:
        REFERENCE.record_decode(records, scales, grad, residual, block, scale=scale)
    else:
        shape = (code, count, block, float(scale))
        native.record_decode(records_at, scales_at, *shape, grad_at, residual_at, launch)


def _number(rule: str, rules: dict[str, int]) -> int:
    if rule not in rules:
        raise ValueError(f"rule must be one of {', '.join(rules)}, got {rule!r}")
    return rules[rule]


def _checked_records(name: str, records: Tensor, count: int, block: int, device: int) -> int:
    size = record_bytes(block)
    return checked(name, records, torch.uint8, -(-count // block) * size, device)
