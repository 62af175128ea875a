"""The operations on what adds up as gradients do: count sketches, and factors of low rank.

A table is one tensor of ``rows * columns`` cells, row after row: float32, and float64 for float64
gradients. ``rules/sketch.h`` says how elements are laid out. The key names the random bits: whoever
adds or reads tables must use the same one, so its rank should be 0 and its purpose ``SKETCH``.
Positions are ``torch.int64`` indices into the bucket.

A tensor of ``rows * columns`` elements is a matrix X, row after row. Factors have one line for each of
``rank`` components: ``left`` is (rank, rows), ``right`` is (rank, columns), both flat and float32, or
float64 for float64 gradients. ``rules/lowrank.h`` says in which order everything is added.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .dispatch import run
from .keys import Key
from .legality import check_factor
from .sizes import check_spans

__all__ = [
    "lowrank_decode",
    "lowrank_left",
    "lowrank_orthonormalise",
    "lowrank_right",
    "lowrank_start",
    "norm_sketch_all",
    "sketch_clear",
    "sketch_encode",
    "sketch_top",
]


# ---- count sketches -----------------------------------------------------------------------------


def sketch_encode(
    grad: Tensor,
    residual: Tensor | None,
    table: Tensor,
    rows: int,
    key: Key,
    *,
    offset: int = 0,
    momentum: Tensor | None = None,
    factor: float = 0.0,
) -> int | Tensor:
    """Add the sketch of ``x = residual + (factor * momentum + grad)`` to a table.

    Sums are made in the order of the elements, so the tensors of a bucket must be given in
    ascending order of their offsets. Nothing but the table is written.

    Args:
        residual: of the table's dtype, or None for zero.
        table: zeros before the first tensor of a bucket.
        offset: which element of the bucket ``grad[0]`` is, a multiple of 64.
        momentum: of the table's dtype, or None for ``x = residual + grad``.

    Returns:
        The number of elements of ``x`` that are not finite.
    """
    check_factor(momentum, factor)
    return run.sketch_encode(grad, residual, momentum, table, rows, key, offset, factor)


def sketch_top(
    table: Tensor,
    rows: int,
    key: Key,
    spans: Sequence[tuple[int, int]],
    k: int,
    positions: Tensor,
    estimates: Tensor,
) -> int:
    """Write the positions and the estimates of the ``k`` elements whose estimates are the largest.

    An estimate is the median over the rows. Magnitudes are compared as integers, so infinity is
    above every number and NaN above infinity; of equal ones the lower position is taken, and zeros
    never are. Positions ascend. On CUDA this waits for the stream: the result is a number.

    Args:
        spans: pairs (start, count) of what may be chosen, ascending, starts multiples of 64.
        positions: int64, ``k`` elements.
        estimates: of the table's dtype, ``k`` elements.

    Returns:
        How many were found: ``k``, or less where fewer estimates differ from zero. What comes after
        them in the outputs is left as it was.
    """
    check_spans(spans)
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    return run.sketch_top(table, positions, estimates, rows, key, spans, k)


def sketch_clear(table: Tensor, rows: int, key: Key, positions: Tensor) -> None:
    """Set to zero every cell that the elements at some positions, in ``[0, 2**31)``, are added to."""
    run.sketch_clear(table, positions, rows, key)


def norm_sketch_all(
    grads: Sequence[Tensor], sums: Sequence[Tensor], key: Key, *, counters: int, offsets: Sequence[int] | None = None
) -> None:
    """Write, for each tensor, counters whose norm is about that of the tensor, and which add up as gradients do.

    Their sum of squares is on average that of the tensor, with a standard deviation of ``sqrt(2 / counters)`` of it
    (a count sketch of one row: Charikar, Chen, Farach-Colton 2002).

    Args:
        sums: float64, the counters of each tensor.
        key: names the random signs and places: whoever adds counters up must use the same one, so its rank should be 0.
        counters: how many each tensor has, 128 or 256.
        offsets: which element of the bucket the first one of a tensor is, multiples of 64; None for 0.
    """
    run.norm_sketch(grads, offsets, sums, key=key, counters=counters)


# ---- factors of low rank ------------------------------------------------------------------------


def lowrank_start(kept: Tensor, right: Tensor, rank: int, key: Key, *, offset: int = 0) -> None:
    """Write the factor that a step begins with, made of the one that the last step left.

    Every line is multiplied by a power of two that brings its largest magnitude near 1, which rounds
    nothing; a line of zeros, or one with a value that is not finite, is drawn from [-1, 1).

    Args:
        kept, right: ``rank`` lines; float32 or float64.
        offset: which number of the stream the first element is.
    """
    run.lowrank_start(kept, right, rank, key, offset)


def lowrank_left(grad: Tensor, residual: Tensor | None, rows: int, right: Tensor, left: Tensor) -> int | Tensor:
    """Write ``X right^T``, with ``X = grad + residual``; neither is changed.

    Args:
        residual: float32 (float64 for float64 gradients), or None for zero.

    Returns:
        The number of elements of ``X`` that are not finite, or 2^96 or more of either sign.
    """
    return run.lowrank_left(grad, residual, right, left, rows)


def lowrank_right(grad: Tensor, residual: Tensor | None, rows: int, left: Tensor, right: Tensor) -> None:
    """Write ``left X``, with ``X = grad + residual``; neither is changed."""
    run.lowrank_right(grad, residual, left, right, rows)


def lowrank_orthonormalise(lines: Tensor, rank: int) -> None:
    """Make ``rank`` lines orthonormal, in place, by modified Gram-Schmidt, done twice.

    A line that depends on those before it, and one that is zero or not finite, becomes zero.
    """
    run.lowrank_orthonormalise(lines, rank)


def lowrank_decode(
    left: Tensor, right: Tensor, rows: int, grad: Tensor, residual: Tensor | None, *, scale: float = 1.0
) -> None:
    """Write ``left^T right * scale`` over the gradient, and ``X - left^T right`` over the residual, if there is one.

    For float16 gradients the product is cut off where the result would be infinite; the residual keeps the rest.
    """
    run.lowrank_decode(left, right, grad, residual, rows, scale)
