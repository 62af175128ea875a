"""The operations on plain numbers, and on what an optimizer keeps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .dispatch import Counts, run
from .legality import check_factor

__all__ = [
    "absorb",
    "adam_hold_all",
    "adam_step_all",
    "dense_add",
    "dense_decode_all",
    "dense_offer_all",
    "sgd_step_all",
    "take_roots",
    "triad",
    "union_count_all",
    "union_decode_all",
    "union_encode_all",
    "union_mark_all",
]


def dense_offer_all(grads: Sequence[Tensor], residuals: Sequence[Tensor] | None, outs: Sequence[Tensor]) -> Counts:
    """Write ``grad + residual`` in the dtype of the outputs, all of one; return how many of these are not finite."""
    return run.dense_offer(grads, residuals, outs)


def dense_decode_all(
    payloads: Sequence[Tensor], grads: Sequence[Tensor], *, scale: float, residuals: Sequence[Tensor] | None = None
) -> None:
    """Write ``payload * scale`` over the gradients; residuals, if given, become 0. The payloads are of one dtype."""
    run.dense_decode(payloads, grads, residuals, scale=scale)


def dense_add(into: Tensor, other: Tensor) -> None:
    """Add ``other`` to ``into``; 16-bit types add in float32 and round to nearest even."""
    run.dense_add(into, other)


def take_roots(values: Tensor) -> Tensor:
    """Take square roots in place, float32 or float64, right to the last bit; return the tensor.

    On the CPU, torch's own differ by a rounding from one kind of processor to another, and ranks may run on several.
    """
    if values.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"values should be float32 or float64, got {values.dtype}")
    if values.device.type != "cpu":
        return values.sqrt_()
    with np.errstate(invalid="ignore"):
        np.sqrt(values.numpy(), out=values.numpy())
    return values


def absorb(grad: Tensor, residual: Tensor, momentum: Tensor | None = None, factor: float = 0.0) -> None:
    """Add a gradient to the residual and set it to zero, all in place.

    With momentum, ``momentum = factor * momentum + grad`` first, and that is what is added: in the
    end the residual holds the ``x`` of :func:`.linear.sketch_encode`.

    Args:
        residual: float32 (float64 for float64 gradients), and so is momentum.
    """
    check_factor(momentum, factor)
    run.absorb(grad, residual, momentum, factor)


def triad(a: Tensor, b: Tensor, c: Tensor, s: float) -> None:
    """Write ``b + s * c``, float32: the yardstick for memory bandwidth."""
    run.triad(a, b, c, s)


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
    _check_adam(betas, step, bound)
    if not 0 <= left <= 1:
        raise ValueError(f"left must be in [0, 1], got {left}")
    columns = (seconds, firsts, grads, squares, floors, _row_lengths(seconds, floors))
    run.adam_hold(*columns, betas=betas, step=step, bound=bound, left=left)


def adam_step_all(
    weights: Sequence[Tensor],
    firsts: Sequence[Tensor],
    grads: Sequence[Tensor],
    squares: Sequence[Tensor],
    floors: Sequence[Tensor] | None,
    *,
    betas: tuple[float, float],
    step: float,
    bound: float,
    lr: float,
    eps: float,
    by: float = 1.0,
    weight_decay: float = 0.0,
    decoupled: bool = False,
) -> None:
    """Do a step of Adam that divides by the root of ``squares``, plus eps, in place of its own second moment.

    Or by more, where the first moment would move an element by more than ``bound`` learning rates, and where this
    gradient alone would make Adam divide by more. It is what :func:`adam_hold_all` with ``left=1`` and torch's step do
    (Kingma and Ba 2015, algorithm 1; decoupled decay: Loshchilov and Hutter 2019, algorithm 2).

    Args:
        weights: of one dtype; they are written.
        firsts: exp_avg, of that dtype and of their sizes, which are written.
        grads: of the same, which are read.
        squares, floors: as of :func:`adam_hold_all`.
        step: the number of this step, from 1 on.
        lr, eps: of the optimizer.
        by: what gradients count times; less than 0 where the step climbs.
        weight_decay, decoupled: as of the optimizer: it enters the gradient unless it is decoupled.
    """
    _check_adam(betas, step, bound)
    columns = (weights, firsts, grads, squares, floors, _row_lengths(weights, floors))
    rule = {"betas": betas, "step": step, "bound": bound, "lr": lr, "eps": eps}
    run.adam_step(*columns, **rule, by=by, weight_decay=weight_decay, decoupled=decoupled)


def _check_adam(betas: tuple[float, float], step: float, bound: float) -> None:
    beta1, beta2 = betas
    if not (0 <= beta1 < 1 and 0 < beta2 < 1 and step >= 1 and bound > 0):
        raise ValueError(
            f"betas must be in [0, 1) and (0, 1), step from 1, bound above 0; got {betas}, {step}, {bound}"
        )


def sgd_step_all(
    weights: Sequence[Tensor],
    buffers: Sequence[Tensor] | None,
    grads: Sequence[Tensor],
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    by: float = 1.0,
    weight_decay: float = 0.0,
) -> None:
    """Do a step of SGD in one pass: torch's own, but that every operation is rounded by itself, of 16 bits in float32.

    Args:
        weights: of one dtype; they are written.
        buffers: momentum_buffer, of that dtype and of their sizes, which are written; None for a step without momentum.
        grads: of the same, which are read.
        lr, momentum, dampening, nesterov, weight_decay: as of the optimizer (Sutskever et al. 2013, section 2).
        by: what gradients count times; less than 0 where the step climbs.
    """
    rule = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
    run.sgd_step(weights, buffers, grads, **rule, by=by, weight_decay=weight_decay)


def _row_lengths(tensors: Sequence[Tensor], floors: Sequence[Tensor] | None) -> list[int]:
    """Return how long the rows of each tensor are that have a floor."""
    if not floors:
        return [max(1, tensor.numel()) for tensor in tensors]
    lengths = []
    for tensor, floor in zip(tensors, floors, strict=True):
        count, rows = tensor.numel(), floor.numel()
        if rows and count % rows:
            raise ValueError(f"{count} elements cannot be in {rows} equal rows")
        lengths.append(max(1, count // max(1, rows)))
    return lengths


def union_mark_all(grads: Sequence[Tensor], bits: Sequence[Tensor], *, block: int) -> Counts:
    """Write a bit for each block of elements, 1 where one of them is not 0; return how many elements are not finite.

    Args:
        bits: of each tensor as many words as its blocks take; the last block may be shorter.
    """
    return run.union_mark(grads, bits, block=block)


def union_count_all(bits: Sequence[Tensor], elements: Sequence[int], *, block: int) -> Counts:
    """Return how many elements bits that are 1 stand for; less than 0 where one is that of no block.

    Args:
        elements: of the tensors.
    """
    return run.union_count(bits, elements, block=block)


def union_encode_all(
    grads: Sequence[Tensor],
    bits: Sequence[Tensor | None],
    kept: Sequence[int],
    values: Sequence[Tensor],
    *,
    block: int,
) -> None:
    """Write the elements whose bits are 1, in order and in the dtype of the arithmetic.

    Args:
        bits: None for a tensor of which all elements are written.
        kept: how many these are of each, as :func:`union_count_all` says.
    """
    _check_whole(grads, bits, kept)
    run.union_encode(grads, bits, kept, values, block=block)


def union_decode_all(
    values: Sequence[Tensor],
    bits: Sequence[Tensor | None],
    kept: Sequence[int],
    grads: Sequence[Tensor],
    *,
    block: int,
    scale: float,
) -> None:
    """Write ``value * scale`` where bits are 1, and 0 elsewhere; the arguments are as of :func:`union_encode_all`."""
    _check_whole(grads, bits, kept)
    run.union_decode(values, bits, kept, grads, block=block, scale=scale)


def _check_whole(grads: Sequence[Tensor], bits: Sequence[Tensor | None], kept: Sequence[int]) -> None:
    for grad, mine, number in zip(grads, bits, kept, strict=True):
        if mine is None and number != grad.numel():
            raise ValueError(f"without bits all {grad.numel()} elements are kept, got {number}")
