"""The kernels for factors of low rank: a tensor as a matrix beside a product of two thin ones.

A tensor of ``rows * columns`` elements is a matrix X, row after row. Factors have one line for each of
``rank`` components: ``left`` is (rank, rows), ``right`` is (rank, columns), both flat and float32, or
float64 for float64 gradients. ``rules/lowrank.h`` says in which order everything is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .keys import Key
from .legality import (
    REFERENCE,
    backend,
    check_all_apart,
    check_apart,
    checked,
    checked_or_none,
    counted,
    draw_stream,
    dtype_code,
    work_dtype,
)

__all__ = ["lowrank_decode", "lowrank_left", "lowrank_orthonormalise", "lowrank_right", "lowrank_start"]


def lowrank_start(kept: Tensor, right: Tensor, rank: int, key: Key, *, offset: int = 0) -> None:
    """Write the factor that a step begins with, made of the one that the last step left.

    Every line is multiplied by a power of two that brings its largest magnitude near 1, which rounds
    nothing; a line of zeros, or one with a value that is not finite, is drawn from [-1, 1).

    Args:
        kept, right: ``rank`` lines; float32 or float64.
        offset: which number of the stream the first element is.
    """
    native, device, launch = backend(kept)
    columns = _lines("kept", kept, rank)
    code = _factor_code("kept", kept)
    kept_at = checked("kept", kept, kept.dtype, kept.numel(), device)
    right_at = checked("right", right, kept.dtype, kept.numel(), device)
    check_apart("right", right, "kept", kept)
    stream = draw_stream(key, offset, kept.numel())
    if REFERENCE:
        REFERENCE.lowrank_start(kept, right, rank, key, offset=offset)
    else:
        native.lowrank_start(kept_at, code, columns, rank, stream, offset, right_at, launch)


def lowrank_left(grad: Tensor, residual: Tensor | None, rows: int, right: Tensor, left: Tensor) -> int | Tensor:
    """Write ``X right^T``, with ``X = grad + residual``; neither is changed.

    Args:
        residual: float32 (float64 for float64 gradients), or None for zero.

    Returns:
        The number of elements of ``X`` that are not finite, or 2^96 or more of either sign.
    """
    native, device, launch = backend(grad)
    x_at, shape, left_at, right_at = _checked_product(grad, residual, rows, left, right, device)
    check_all_apart({"left": left}, {"grad": grad, "residual": residual, "right": right})
    if REFERENCE:
        return int(REFERENCE.lowrank_left(grad, residual, rows, right, left))
    return counted(native.lowrank_left, (*x_at, *shape, right_at, left_at), device, launch)


def lowrank_right(grad: Tensor, residual: Tensor | None, rows: int, left: Tensor, right: Tensor) -> None:
    """Write ``left X``, with ``X = grad + residual``; neither is changed."""
    native, device, launch = backend(grad)
    x_at, shape, left_at, right_at = _checked_product(grad, residual, rows, left, right, device)
    check_all_apart({"right": right}, {"grad": grad, "residual": residual, "left": left})
    if REFERENCE:
        REFERENCE.lowrank_right(grad, residual, rows, left, right)
    else:
        native.lowrank_right(*x_at, *shape, left_at, right_at, launch)


def lowrank_orthonormalise(lines: Tensor, rank: int) -> None:
    """Make ``rank`` lines orthonormal, in place, by modified Gram-Schmidt, done twice.

    A line that depends on those before it, and one that is zero or not finite, becomes zero.
    """
    native, device, launch = backend(lines)
    count = _lines("lines", lines, rank)
    code = _factor_code("lines", lines)
    lines_at = checked("lines", lines, lines.dtype, lines.numel(), device)
    if REFERENCE:
        REFERENCE.lowrank_orthonormalise(lines, rank)
    else:
        native.lowrank_orthonormalise(lines_at, code, count, rank, launch)


def lowrank_decode(
    left: Tensor, right: Tensor, rows: int, grad: Tensor, residual: Tensor | None, *, scale: float = 1.0
) -> None:
    """Write ``left^T right * scale`` over the gradient, and ``X - left^T right`` over the residual, if there is one.

    For float16 gradients the product is cut off where the result would be infinite; the residual keeps the rest.
    """
    native, device, launch = backend(grad)
    x_at, shape, left_at, right_at = _checked_product(grad, residual, rows, left, right, device)
    check_all_apart({"grad": grad, "residual": residual}, {"left": left, "right": right})
    if REFERENCE:
        REFERENCE.lowrank_decode(left, right, rows, grad, residual, scale=scale)
    else:
        native.lowrank_decode(left_at, right_at, *shape, float(scale), *x_at, launch)


def _lines(name: str, factor: Tensor, rank: int) -> int:
    """Return the length of the lines of a factor."""
    if rank < 1 or factor.numel() < rank or factor.numel() % rank:
        raise ValueError(f"{name} must be rank >= 1 lines of at least one number, got {factor.numel()} for rank {rank}")
    return factor.numel() // rank


def _factor_code(name: str, factor: Tensor) -> int:
    if factor.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{name} must be float32 or float64, got {factor.dtype}")
    return dtype_code(name, factor)


def _checked_product(
    grad: Tensor, residual: Tensor | None, rows: int, left: Tensor, right: Tensor, device: int
) -> tuple[tuple[int, int], tuple[int, int, int, int], int, int]:
    """Check X and its factors; return the addresses of X, (dtype, rows, columns, rank), and those of the factors."""
    count, numbers, kind = grad.numel(), right.numel(), work_dtype(grad.dtype)
    if rows < 1 or count < rows or count % rows:
        raise ValueError(f"grad must be rows >= 1 rows of at least one element, got {count} elements in {rows} rows")
    columns = count // rows
    if numbers < columns or numbers % columns:
        raise ValueError(f"right must be rank >= 1 lines of {columns} numbers, got {numbers}")
    grad_at = checked("grad", grad, grad.dtype, count, device)
    residual_at = checked_or_none("residual", residual, kind, count, device)
    rank = numbers // columns
    left_at = checked("left", left, kind, rank * rows, device)
    right_at = checked("right", right, kind, numbers, device)
    return (grad_at, residual_at), (dtype_code("grad", grad), rows, columns, rank), left_at, right_at
