"""Count sketches: tables that add up, and the largest elements that can be read from them.

A table is one tensor of ``rows * columns`` cells, row after row: float32, and float64 for float64
gradients. ``rules/sketch.h`` says how elements are laid out. The key names the random bits: whoever
adds or reads tables must use the same one, so its rank should be 0 and its purpose ``SKETCH``.
Positions are ``torch.int64`` indices into the bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .keys import Key
from .legality import (
    REFERENCE,
    backend,
    check_all_apart,
    check_apart,
    check_factor,
    check_one_of,
    checked,
    checked_or_none,
    counted,
    dtype_code,
    work_dtype,
)

__all__ = ["absorb", "sketch_clear", "sketch_columns", "sketch_encode", "sketch_top"]

ROWS = (1, 3, 5)
#: Elements that are laid out together; the places of a row, of this many cells, are a prime number.
BLOCK = 16
#: Tensors and spans begin at multiples of this.
ALIGNMENT = 64
MAX_ELEMENTS = 1 << 31


@lru_cache(maxsize=1024)
def _is_prime(number: int) -> bool:
    return number >= 2 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def sketch_columns(target: int) -> int:
    """Return the largest number of columns that a table can have, at most ``max(target, 32)``."""
    places = min(max(target, 2 * BLOCK), MAX_ELEMENTS) // BLOCK
    while not _is_prime(places):
        places -= 1
    return BLOCK * places


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
    native, device, launch = backend(grad)
    count, code = grad.numel(), dtype_code("grad", grad)
    at = _checked_x(grad, residual, momentum, factor, device)
    table_at, places = _checked_table(table, rows, device, work_dtype(grad.dtype))
    check_all_apart({"table": table}, {"grad": grad, "residual": residual, "momentum": momentum})
    if offset < 0 or offset % ALIGNMENT or offset + count > MAX_ELEMENTS:
        raise ValueError(
            f"offset must be a multiple of {ALIGNMENT}, and elements must lie in [0, {MAX_ELEMENTS}), "
            f"got {offset} + {count}"
        )
    if REFERENCE:
        options = {"offset": offset, "momentum": momentum, "factor": factor}
        return int(REFERENCE.sketch_encode(grad, residual, table, rows, key, **options))
    shape = (float(factor), code, count, offset, rows, places)
    arguments = (*at, *shape, key.words(), table_at)
    return counted(native.sketch_encode, arguments, device, launch)


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
    native, device, launch = backend(table)
    table_at, places = _checked_table(table, rows, device)
    _check_spans(spans)
    if k < 0:
        raise ValueError(f"k must be at least 0, got {k}")
    positions_at = checked("positions", positions, torch.int64, k, device)
    estimates_at = checked("estimates", estimates, table.dtype, k, device)
    check_all_apart({"positions": positions, "estimates": estimates}, {"table": table})
    if REFERENCE:
        return int(REFERENCE.sketch_top(table, rows, key, spans, k, positions, estimates))
    shape = (dtype_code("table", table), rows, places, key.words())
    return int(native.sketch_top(table_at, *shape, spans, len(spans), k, positions_at, estimates_at, launch))


def sketch_clear(table: Tensor, rows: int, key: Key, positions: Tensor) -> None:
    """Set to zero every cell that the elements at some positions, in ``[0, 2**31)``, are added to."""
    native, device, launch = backend(table)
    count = positions.numel()
    table_at, places = _checked_table(table, rows, device)
    positions_at = checked("positions", positions, torch.int64, count, device)
    check_apart("positions", positions, "table", table)
    if REFERENCE:
        REFERENCE.sketch_clear(table, rows, key, positions)
    else:
        shape = (dtype_code("table", table), rows, places, key.words())
        native.sketch_clear(table_at, *shape, positions_at, count, launch)


def absorb(grad: Tensor, residual: Tensor, momentum: Tensor | None = None, factor: float = 0.0) -> None:
    """Add a gradient to the residual and set it to zero, all in place.

    With momentum, ``momentum = factor * momentum + grad`` first, and that is what is added: in the
    end the residual holds the ``x`` of :func:`sketch_encode`.

    Args:
        residual: float32 (float64 for float64 gradients), and so is momentum.
    """
    native, device, launch = backend(grad)
    count, code = grad.numel(), dtype_code("grad", grad)
    at = _checked_x(grad, residual, momentum, factor, device)
    check_all_apart({"grad": grad, "residual": residual, "momentum": momentum}, {})
    if REFERENCE:
        REFERENCE.absorb(grad, residual, momentum, factor)
    else:
        native.absorb(*at, float(factor), code, count, launch)


def _checked_x(
    grad: Tensor, residual: Tensor | None, momentum: Tensor | None, factor: float, device: int
) -> tuple[int, int, int]:
    """Check what ``x`` is made of and return the addresses."""
    count, kind = grad.numel(), work_dtype(grad.dtype)
    check_factor(momentum, factor)
    return (
        checked("grad", grad, grad.dtype, count, device),
        checked_or_none("residual", residual, kind, count, device),
        checked_or_none("momentum", momentum, kind, count, device),
    )


def _checked_table(table: Tensor, rows: int, device: int, kind: torch.dtype | None = None) -> tuple[int, int]:
    """Check a table and return its address and the places of a row."""
    check_one_of("rows", rows, ROWS)
    if table.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"table must be float32 or float64, got {table.dtype}")
    cells = table.numel()
    places = cells // (rows * BLOCK)
    if cells != rows * BLOCK * places or not _is_prime(places) or places * BLOCK > MAX_ELEMENTS:
        raise ValueError(
            f"table must have {rows} rows of {BLOCK} * C columns, C prime and at most {MAX_ELEMENTS // BLOCK} "
            f"(sketch_columns chooses them), got {cells} cells"
        )
    return checked("table", table, kind or table.dtype, cells, device), places


def _check_spans(spans: Sequence[tuple[int, int]]) -> None:
    end = 0
    for start, count in spans:
        if start < end or start % ALIGNMENT or count < 0 or start + count > MAX_ELEMENTS:
            raise ValueError(
                f"spans must be pairs (start, count) with starts that are multiples of {ALIGNMENT}, ascending, "
                f"apart and below {MAX_ELEMENTS}, got ({start}, {count}) after the end {end}"
            )
        end = start + count
