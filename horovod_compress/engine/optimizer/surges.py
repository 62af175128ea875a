"""Surges: coded results that are far larger than usual, which a second moment that is held takes in.

Adam's own second moment takes in every gradient. After one that is ten times as large as others, as they come early in
a training, its steps stay shorter for as long as that mean of squares remembers. What is held between exact rounds
would never hear of it: the surge, and the residual that it leaves, would move weights several times as far as Adam
does. So what is held takes in such a result, for the one step. Other coded results stay out of it: with their errors,
they are larger than the mean gradient in every step. So do those of sparse methods, where one element has what was left
of a hundred steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import ops
from ...ops.checksums import on_its_device
from .held_moment import HeldMoment

#: A surge is so many times as large as what the second moment stands for, and as what is usual.
TIMES = 2.0
#: What is usual moves by this part of the way to each result.
SHARE = 0.1
#: Before the first result, what is usual is at most so many times as large as what the second moment stands for.
FIRST = 5.0
#: Of each tensor, so many elements are looked at, in its middle.
LOOKED_AT = 4096


@dataclass(frozen=True)
class Result:
    """A coded result that is not empty, before weight decay: a gradient, which counts so many times."""

    name: str
    grad: Tensor
    times: float
    held: HeldMoment


@torch.no_grad()
def surges(results: Sequence[Result]) -> frozenset[str]:
    """Return whose results are surges, by name, and let all results count for what is usual."""
    changed = [result.held for result in results if result.held.size is None]
    for held, size in zip(changed, _means([held.moment for held in changed], power=1), strict=True):
        held.size = size
    squares = _means([result.grad for result in results], power=2)
    both = zip(results, squares, strict=True)
    return frozenset(result.name for result, square in both if _is_surge(result.held, square * result.times**2))


def _is_surge(held: HeldMoment, square: float) -> bool:
    if not 0.0 < square < math.inf:  # rows of an embedding may have nothing for a while
        return False
    size = held.size or 0.0
    # The first result may be a surge: it does not say alone what is usual.
    usual = held.usual or (min(square, FIRST**2 * size) if size else square)
    surge = square > TIMES**2 * max(usual, size)
    held.usual = usual + SHARE * (square - usual)
    return surge


def _means(tensors: Sequence[Tensor], power: int) -> list[float]:
    """Return the mean of ``|x| ** power`` of each tensor where it is looked at; equal on all ranks."""
    kinds: dict[tuple[int, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.get_device(), tensor.dtype), []).append(number)
    found = [0.0] * len(tensors)
    for numbers in kinds.values():
        middles = [_middle(tensors[number]) for number in numbers]
        for number, middle, total in zip(numbers, middles, _sums(middles, power), strict=True):
            found[number] = total / middle.numel()
    return found


def _middle(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().view(-1)  # reshape() may give a view with gaps
    spare = flat.numel() - LOOKED_AT
    return flat.narrow(0, spare // 2, LOOKED_AT) if spare > 0 else flat


def _sums(values: Sequence[Tensor], power: int) -> list[float]:
    sums = torch.zeros(len(values), dtype=torch.float64, device=values[0].device)
    with on_its_device(sums):
        ops.norm_offer_all(values, sums.view(-1, 1).unbind(), [value.numel() for value in values], power=power)
    return sums.tolist()
