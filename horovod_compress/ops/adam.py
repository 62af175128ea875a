"""The kernel that sets Adam's second moment to what is held, before the optimizer's own step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .dispatch import batch

__all__ = ["adam_hold_all"]

_HOLD = batch("adam_hold")


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
    beta1, beta2 = betas
    if not (0 <= beta1 < 1 and 0 < beta2 < 1 and step >= 1 and bound > 0 and 0 <= left <= 1):
        raise ValueError(
            f"betas must be in [0, 1) and (0, 1), step from 1, bound above 0, left in [0, 1]; got {betas}, {step}, "
            f"{bound}, {left}"
        )
    row_lengths = []
    for i, second in enumerate(seconds):
        count, rows = second.numel(), floors[i].numel() if floors else 1
        if rows and count % rows:
            raise ValueError(f"{count} elements cannot be in {rows} equal rows")
        row_lengths.append(max(1, count // max(1, rows)))
    least, wanted = 1 / ((1 - beta1**step) * bound), (1 - beta2**step) / beta2
    scales = (1 - beta1, least, wanted, (1 - beta2) / beta2, 1 - left)
    options = {"betas": betas, "step": step, "bound": bound, "left": left}
    _HOLD((seconds, firsts, grads, squares, floors, row_lengths), (scales,), options)
