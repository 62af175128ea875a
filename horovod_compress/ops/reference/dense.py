"""Plain numbers, and what an optimizer keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .numbers import load, most_kept, offered, quiet, store, unpacked, write_bits


def dense_offer(grad: Tensor, residual: Tensor | None, out: Tensor) -> int:
    store(out, offered(grad, residual))
    return int(np.count_nonzero(~np.isfinite(load(out))))


@quiet
def dense_add(into: Tensor, other: Tensor) -> None:
    store(into, load(into) + load(other))


@quiet
def dense_decode(payload: Tensor, grad: Tensor, *, scale: float, residual: Tensor | None = None) -> None:
    work = np.float64 if torch.float64 in (payload.dtype, grad.dtype) else np.float32
    store(grad, load(payload).astype(work) * work(scale))
    if residual is not None:
        residual.zero_()


def union_mark(grad: Tensor, bits: Tensor, *, block: int) -> int:
    x = load(grad)
    padded = np.zeros(-(-x.size // block) * block, dtype=bool)
    padded[: x.size] = x.reshape(-1) != 0
    write_bits(bits, np.asarray(padded.reshape(-1, block).any(axis=1)))
    return int(np.count_nonzero(~np.isfinite(x)))


def union_count(bits: Tensor, elements: int, *, block: int) -> int:
    every = unpacked(bits, 64 * bits.numel())
    outside = every[-(-elements // block) :].any()
    return int(_in_union(bits, elements, block).sum()) - (1 << 62) * int(outside)


def union_encode(grad: Tensor, bits: Tensor | None, kept: int, values: Tensor, *, block: int) -> None:
    x = load(grad).reshape(-1)
    values.numpy()[:] = x[_in_union(bits, x.size, block)]


@quiet
def union_decode(values: Tensor, bits: Tensor | None, kept: int, grad: Tensor, *, block: int, scale: float) -> None:
    result = np.zeros(grad.numel(), dtype=values.numpy().dtype)
    result[_in_union(bits, result.size, block)] = values.numpy() * result.dtype.type(scale)
    store(grad.view(-1), result)


def _in_union(bits: Tensor | None, elements: int, block: int) -> np.ndarray:
    """Return of which elements the bits are 1; of all of them without bits."""
    if bits is None:
        return np.ones(elements, dtype=bool)
    return unpacked(bits, -(-elements // block)).repeat(block)[:elements]


def triad(a: Tensor, b: Tensor, c: Tensor, s: float) -> None:
    a.numpy()[:] = b.numpy() + np.float32(s) * c.numpy()


@quiet
def adam_hold(
    second: Tensor,
    first: Tensor,
    grad: Tensor,
    square: Tensor,
    floors: Tensor | None,
    row_length: int,
    *,
    betas: tuple[float, float],
    step: float,
    bound: float,
    left: float,
) -> None:
    beta1, beta2 = betas
    m, g, d = load(first), load(grad), _at_least(square, floors, row_length).reshape(first.shape)
    number = d.dtype.type
    most = number(1 / ((1 - beta1**step) * bound)) * (m + number(1 - beta1) * (g - m))
    d = np.where(most * most > d, most * most, d)
    coming = number((1 - beta2) / beta2) * (g * g)
    given = number((1 - beta2**step) / beta2) * d - coming
    below = number(1e-30) - number(1 - left) * coming
    lowest = np.where((below < 0) & (below >= -most_kept(below)), below, number(0))
    store(second, np.where(given > lowest, given, lowest))


@quiet
def adam_step(
    weight: Tensor,
    first: Tensor,
    grad: Tensor,
    square: Tensor,
    floors: Tensor | None,
    row_length: int,
    *,
    betas: tuple[float, float],
    step: float,
    bound: float,
    lr: float,
    eps: float,
    by: float,
    weight_decay: float,
    decoupled: bool,
) -> None:
    (beta1, beta2), unbiased = betas, 1 - betas[0] ** step
    weight = weight.detach()
    p, m, d = load(weight), load(first), _at_least(square, floors, row_length).reshape(weight.shape)
    number = d.dtype.type
    g = number(by) * load(grad)
    if weight_decay and not decoupled:
        g = g + number(weight_decay) * p
    m = m + number(1 - beta1) * (g - m) if 1 - beta1 < 0.5 else g + number(-beta1) * (g - m)
    least, coming = number(1 / (unbiased * bound)) * m, number((1 - beta2) / (1 - beta2**step)) * (g * g)
    for other in (least * least, coming):
        d = np.where(other > d, other, d)
    moved = number(lr / unbiased) * m / (np.sqrt(d) + number(eps))
    store(weight, number(1 - lr * weight_decay if decoupled else 1) * p - moved)
    store(first, m)


@quiet
def sgd_step(
    weight: Tensor,
    buffer: Tensor | None,
    grad: Tensor,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    nesterov: bool,
    by: float,
    weight_decay: float,
) -> None:
    weight = weight.detach()
    p, g = load(weight), load(grad)
    number = p.dtype.type
    g = number(by) * g
    if weight_decay:
        g = g + number(weight_decay) * p
    if buffer is not None:
        kept = number(momentum) * load(buffer) + number(1 - dampening) * g
        g = g + number(momentum) * kept if nesterov else kept
        store(buffer, kept)
    store(weight, p - number(lr) * g)


def _at_least(square: Tensor, floors: Tensor | None, row_length: int) -> Any:
    """Return squares that are at least the floors of their rows."""
    d = square.numpy().reshape(-1)
    if floors is None:
        return d
    floor = floors.numpy().reshape(-1).repeat(row_length)[: d.size]
    return np.where(floor > d, floor, d)
