"""Rows that seldom have a gradient, such as those of rare words: what stands in for V there.

V moves in exact rounds, and between two of them most words have no gradient at all. By the next one, V of such a row
may have faded to almost nothing, or never have had anything. A coded gradient that comes now, divided by its root,
would move the row by :data:`.second_moment.BOUND` learning rates, for as long as the first moment has anything of it.
So the optimizer's own second moment of what comes there stands in for V.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ... import ops
from ...ops.checksums import on_its_device
from ..shards import local
from .second_moment import SURPASSES, BareMoment, Form, Group, Moment, State

#: A row is rare where the mean of V is at most this part of what it is in rows that have had a gradient.
RARE = 0.01
#: In a row that is no longer rare, what stands in is dropped below this part of V's floor.
NEGLIGIBLE = 1e-6
#: Where fewer than one row in so many are asked for, only these are read: it takes a copy of them.
FEW = 6


def take_in(
    form: Form, held: Moment, group: Group, state: State, parameter: nn.Parameter, now: float, by: float = 1.0
) -> None:
    """Let what stands in for V in rare rows take in a gradient, by the optimizer's own rule.

    V itself stays as it is: so it shows which elements have had no exact gradient. Once a row is no longer rare, what
    stands in there fades like the square of the first moment.

    Args:
        state: the optimizer's, of the parameter.
        parameter: with the gradient of this step, which counts so many times; each row for its largest element, as a
            code may send few.
        now: the number of this step.
    """
    if held.moment.dim() < 2 or not held.moment.numel():
        return
    assert parameter.grad is not None
    rows = find(form, held, group, state, now - 1)
    if held.surpassed is None:
        return
    stand_in = held.stand_in
    assert stand_in is not None
    own = BareMoment(stand_in.view(-1)[rows], now - 1)
    form.move(own, group, _largest(local(parameter.grad), rows).to(own.moment).mul_(by), 1.0)
    if held.fades:
        stand_in = stand_in * form.betas(group)[0] ** 2
        stand_in *= stand_in > NEGLIGIBLE * held.floor
    # Not in place: the step before may have been made in inference mode.
    held.stand_in = stand_in.view(-1).index_copy(0, rows, _finite(own.moment)).view(held.floor.shape)


def find(form: Form, held: Moment, group: Group, state: State, steps: float) -> Tensor:
    """Return which rows are rare.

    Where V has moved since, those that are so only now begin with what the first moment has of them: a gradient that
    came shortly before.

    Args:
        steps: how many the optimizer has done.
    """
    if held.rare_rows is None:
        held.rare_rows = (held.floor <= held.usual_floor() * RARE).view(-1).nonzero().view(-1)
        if held.stand_in is None or held.moved:
            found = _remembered(form, held, group, state, steps)
            held.stand_in = found if held.stand_in is None else torch.where(held.stand_in == 0, found, held.stand_in)
        held.fades = bool(held.stand_in.view(-1).index_fill(0, held.rare_rows, 0).any())
        if held.rare_rows.numel() or held.fades:
            largest = held.moment.view(held.floor.numel(), -1).amax(1)
            held.surpassed = largest.mul_(SURPASSES).view(held.floor.shape)
    return held.rare_rows


def _remembered(form: Form, held: Moment, group: Group, state: State, steps: float) -> Tensor:
    """Return what begins to stand in for V: the square of what the first moment has of a row, after some steps.

    Also for states that lack what stood in, as those of other shards do.
    """
    found, first = torch.zeros_like(held.floor), state.get(form.first)
    if first is not None and steps and held.rare_rows is not None:
        mean = _largest(local(first), held.rare_rows).to(found).div_(1 - form.betas(group)[0] ** steps)
        found.view(-1).index_copy_(0, held.rare_rows, _finite(mean.square_()))
    return found


def _finite(squares: Tensor) -> Tensor:
    """Let squares that have overflowed be the largest number."""
    return squares.clamp_(max=torch.finfo(squares.dtype).max)


def _largest(values: Tensor, rows: Tensor) -> Tensor:
    """Return the largest ``|x|`` of some rows, in which what is not finite counts as 0."""
    few = FEW * rows.numel() < len(values)  # most often: then only these are read
    among = (values.index_select(0, rows) if few else values).contiguous()
    found = torch.zeros(len(among), dtype=torch.promote_types(among.dtype, torch.float32), device=among.device)
    if among.numel():
        with on_its_device(among):
            ops.norm_offer_all([among.view(-1)], [found], [among.numel() // len(among)])
    return found if few else found[rows]
