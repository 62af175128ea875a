"""The kernel that sets Adam's second moment to what is held, before the optimizer's own step."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from .legality import REFERENCE, backend, check_apart, check_lengths, checked, dtype_code, work_dtype

ORACLE: ModuleType | None = None
if REFERENCE:
    from .reference import adam as ORACLE


def adam_hold_all(
    seconds: Sequence[Tensor],
    firsts: Sequence[Tensor],
    grads: Sequence[Tensor],
    squares: Sequence[Tensor],
    floors: Sequence[Tensor] | None,
    *,
    betas: tuple[float, float],
    step: float,
    bound: float,
    left: float,
) -> None:
    """Set the second moments of Adam so that its coming step divides by the root of ``squares``, plus eps.

    Or by more, where its first moment would move an element by more than ``bound`` learning rates. Adam adds the square
    of this gradient to what it is given, so that may be less than 0 until it has.

    Args:
        seconds: exp_avg_sq of the tensors, which are written, whatever they held.
        firsts: exp_avg, of their dtype and size.
        grads: as Adam's moments take them in, of the same dtype.
        squares: of the arithmetic type: float64 for float64, else float32.
        floors: what the squares of a row count for at least, of the same type; as many for each tensor as it has
            rows. None for 0.
        step: the number of the coming step, from 1 on.
        left: at least this part of that square stays, from 0 to 1.
    """
    number = len(seconds)
    check_lengths(number, firsts=firsts, grads=grads, squares=squares, floors=floors)
    if not number:
        return
    native, device, launch = backend(seconds[0])
    dtype, code, rows = seconds[0].dtype, dtype_code("second", seconds[0]), []
    for i, (second, first, grad, square) in enumerate(zip(seconds, firsts, grads, squares, strict=True)):
        count, number_of_rows = second.numel(), floors[i].numel() if floors else 1
        at = [checked(n, t, dtype, count, device) for n, t in (("second", second), ("first", first), ("grad", grad))]
        at.append(checked("square", square, work_dtype(dtype), count, device))
        at.append(checked("floor", floors[i], work_dtype(dtype), number_of_rows, device) if floors else 0)
        if number_of_rows and count % number_of_rows:
            raise ValueError(f"{count} elements cannot be in {number_of_rows} equal rows")
        for name, other in (("first", first), ("grad", grad), ("square", square)):
            check_apart("second", second, name, other)
        rows.append((*at, count, max(1, count // max(1, number_of_rows))))
    beta1, beta2 = betas
    if not (0 <= beta1 < 1 and 0 < beta2 < 1 and step >= 1 and bound > 0 and 0 <= left <= 1):
        raise ValueError(
            f"betas must be in [0, 1) and (0, 1), step from 1, bound above 0, left in [0, 1]; got {betas}, {step}, "
            f"{bound}, {left}"
        )
    if ORACLE:
        ORACLE.adam_hold_all(seconds, firsts, grads, squares, floors, betas=betas, step=step, bound=bound, left=left)
        return
    least, wanted = 1 / ((1 - beta1**step) * bound), (1 - beta2**step) / beta2
    native.adam_hold_all(rows, code, 1 - beta1, least, wanted, (1 - beta2) / beta2, 1 - left, launch)
