"""The second moment V of Adam and its kin, held: which rounds renew it, how it moves, and how a step divides by it.

V moves by exact mean gradients, which every rank has, and so it is equal everywhere and costs no bytes:

    V = b2^n V + (1 - b2^n) r^2     r = mean of the ranks' gradients, n steps since the last such r

Where gradients are exchanged, n is limited, see :func:`counted`.

The optimizer stays what it is: before its step, its state is set so that its own formula divides by what is held.
:mod:`.family` knows the optimizers; :mod:`.held` does this where gradients are exchanged, :mod:`.update_moment` where
weight updates are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import ConfigError
from ...ops.checksums import on_its_device
from ..shards import local

# ---- how it moves, and how a step divides by it --------------------------------------------------

#: A divisor is at least this part of the root mean square of its row: an element that has hardly moved yet must
#: neither set its row's scale nor be divided by almost nothing.
FLOOR = 0.1
#: No element moves by more than so many learning rates in a step, as in Adam itself (Kingma and Ba 2015, section 2.1).
BOUND = 10.0
#: In a second moment that no exact gradient has moved yet, a coded one stands for so many steps, and all of them for at
#: most so many. Below 1 it is known by that: the first exact gradient takes their place.
BRIEF, MOST_BRIEF = 0.001, 0.5

#: In one exact round, V forgets at most this part of itself, unless one step alone lets it forget more. Where b2 is
#: small, it would forget nearly all, over the many steps that the round stands for. Then it would be the square of one
#: gradient, which is next to nothing in some elements by chance: they would move several times as far as others until
#: the next exact round. With b2 = 0.999, this limits rounds that are more than 105 steps apart, with 0.99 more than 10.
MOST_FORGOTTEN = 0.1

#: What stands in for V in a row counts where it is more than so many times the largest of V there. Else V serves: as
#: results of a code are larger than gradients everywhere, rows that are small in all steps would move too little.
SURPASSES = 20.0

#: What an optimizer's group of parameters has, and its state of one parameter.
Group = Mapping[str, Any]
State = Mapping[str, Any]
Slot = tuple[dict[str, Any], nn.Parameter, str]


def check_options(second_moment: str, **numbers: object) -> None:
    """Refuse options that have no meaning; a number that is None was not given.

    Raises:
        ConfigError: says which.
    """
    if second_moment not in ("auto", "shared", "own"):
        raise ConfigError(f'second_moment should be "auto", "shared" or "own", got {second_moment!r}')
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} should be a whole number, at least 1, got {value!r}")


@dataclass
class BareMoment:
    """A second moment, without what follows from it.

    Attributes:
        moment: V / (1 - b2^s), of at least 32 bits, contiguous.
        steps: s, the steps that it stands for.
    """

    moment: Tensor
    steps: float

    def derive(self) -> None:
        """Find what follows from V: here, nothing does."""

    def move(self, grad: Tensor, beta2: float, steps: float) -> None:
        """Take in an exact mean gradient, for all steps since the last one."""
        keep, share = beta2**steps, 1 - beta2**self.steps
        self.steps += steps
        self.moment.mul_(keep * share).addcmul_(grad, grad, value=1 - keep).div_(1 - beta2**self.steps)
        self.derive()


@dataclass
class Moment(BareMoment):
    """The second moment of one parameter; equal on every rank, but for what stands in for it in update mode.

    Attributes:
        stand_in: what V counts for at least in every round, for each row in which that is more than ``surpassed``, see
            :mod:`.rare_rows`; None where nobody knows.
        floor: what V counts for at least in compressed rounds, for each row, because of others in it.
        rare_rows: the rows in which something stands in for V until it moves again; None until they are needed.
        surpassed: see :data:`SURPASSES`, for each row; None where nothing stands in until V moves again.
        fades: something stands in for V in rows that are not rare any longer.
        moved: V is another one than it was when the rare rows were found.
    """

    stand_in: Tensor | None = field(default=None, kw_only=True)
    floor: Tensor = field(init=False)
    rare_rows: Tensor | None = field(init=False, default=None)
    surpassed: Tensor | None = field(init=False, default=None)
    fades: bool = field(init=False, default=False)
    moved: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.derive()
        self.moved = False

    def derive(self) -> None:
        several = self.moment.dim() > 1
        rows = self.moment.shape[0] if several else 1
        shape = (rows, *[1] * (self.moment.dim() - 1)) if several else ()
        self.floor = (mean_power(self.moment, 1, rows) * FLOOR**2).to(self.moment.dtype).view(shape)
        self.rare_rows = self.surpassed = None
        self.moved = True

    def begin_stand_in(self) -> None:
        """Let nothing stand in for V yet: the optimizer has made it until now."""
        self.stand_in = torch.zeros_like(self.floor) if self.moment.dim() > 1 else None

    def usual_floor(self) -> Tensor:
        """Return the mean of ``floor`` over the rows that have had a gradient."""
        rows = self.floor.numel()
        mean = mean_power(self.floor, 1) * rows / (rows - (self.floor == 0).sum()).clamp_(min=1)
        return mean.to(self.floor.dtype)

    def least(self, *, exact: bool) -> Tensor | None:
        """Return what V counts for at least in a step, for each row; None for nothing.

        Args:
            exact: divide by V without :data:`FLOOR`.
        """
        if self.stand_in is None or self.surpassed is None:
            return None if exact else self.floor
        stand_in = self.stand_in * (self.stand_in > self.surpassed)
        return stand_in if exact else torch.maximum(self.floor, stand_in)

    def squares(self, *, exact: bool = False) -> Tensor:
        """Return the squares of what a step divides by, but for eps, which the optimizer adds itself."""
        least = self.least(exact=exact)
        return self.moment.clone() if least is None else torch.maximum(self.moment, least)

    def state(self) -> dict[str, Any]:
        """Return what has to be saved: the arguments of another one. The tensor ``moment`` is the one in use."""
        more = {} if self.stand_in is None else {"stand_in": self.stand_in.clone()}
        return more | {"moment": self.moment, "steps": self.steps}


def counted(beta2: float, steps: float) -> float:
    """Return for how many of the steps since the last one an exact gradient counts, see :data:`MOST_FORGOTTEN`.

    A whole number of them, at least 1, so that ranks whose logarithms differ in the last bit agree.
    """
    if steps <= 1 or not 0 < beta2 < 1:
        return steps
    return min(steps, max(1.0, math.floor(math.log(1 - MOST_FORGOTTEN) / math.log(beta2))))


def unmoved(moment: Tensor, group: int, before: Tensor | None = None) -> Tensor | None:
    """Return the elements whose second moment is exactly 0, unless they stay 0 anyway.

    They do where each group of so many elements is wholly 0 or not at all, as the rows of an embedding are. Once one
    group has both, as in a pruned layer, one that is wholly 0 now may have both when its first gradient comes.

    Returns:
        Their indices, or None if there are none; ``before``, where these are the same.
    """
    zero = moment.view(-1) == 0
    if group == 1 or not bool(zero.any()):
        return None
    if group > 1:
        groups = nn.functional.pad(zero, (0, -zero.numel() % group), value=bool(zero[-1])).view(-1, group)
        if not bool((groups.any(dim=1) & ~groups.all(dim=1)).any()):
            return None
    index = zero.nonzero().view(-1)
    return before if before is not None and torch.equal(index, before) else index


def mean_power(values: Tensor, power: int, rows: int = 1) -> Tensor:
    """Return the mean of ``|x| ** power`` of each row, float64; equal on all ranks.

    Torch sums in an order that depends on its number of threads, which ranks need not share.
    """
    sums = torch.zeros(rows, dtype=torch.float64, device=values.device)
    if not values.numel():
        return sums
    length = values.numel() // rows
    with on_its_device(values):
        ops.norm_offer_all([values.view(-1)], [sums], [length], power=power)
    return sums.div_(length)


def places(optimizer: Any, names: Mapping[int, str]) -> Iterator[Slot]:
    """Return the parameters of an optimizer that have a name, each with its group.

    Args:
        names: by the parameter's id.
    """
    for group in optimizer.param_groups:
        yield from ((group, parameter, names[id(parameter)]) for parameter in group["params"] if id(parameter) in names)


def names_of(named: Iterable[tuple[str, nn.Parameter]]) -> dict[int, str]:
    """Return names by the parameter's id."""
    return {id(parameter): name for name, parameter in named}


@dataclass(frozen=True)
class Form:
    """Where an optimizer keeps its second moment, and what it makes of it; by default as Adam does.

    Attributes:
        second: the state that it divides by the root of: a running mean of squares.
        first: the state that it divides; empty for the gradient itself.
        decay: the option that says how fast the mean forgets; empty for the second of ``betas``.
        count: the option in which a group counts its steps; empty where each parameter's state has ``step``.
        decoupled: weight decay never enters the moments.
        unbiased: it divides the bias out of the mean.
        left: of the square that a gradient adds to the second moment, at least this part stays there in :meth:`write`;
            the rest may be taken off beforehand. Below 1 the state may be less than nothing until the step is done,
            with this very gradient. In 16 bits all of it stays.
    """

    second: str = "exp_avg_sq"
    first: str = "exp_avg"
    decay: str = ""
    count: str = ""
    decoupled: bool = False
    unbiased: bool = True
    left: float = 1.0

    def steps(self, group: Group, state: State) -> float:
        """Return how many steps the optimizer has done with a parameter."""
        return float(group[self.count] if self.count else state["step"])

    def betas(self, group: Group) -> tuple[float, float]:
        """Return how fast what is divided forgets, and how fast the second moment does."""
        return (
            float(group["betas"][0]) if self.first else 0.0,
            float(group[self.decay] if self.decay else group["betas"][1]),
        )

    def gradient(self, optimizer: Any, group: Group, parameter: nn.Parameter, by: float = 1.0) -> Tensor:
        """Return the gradient, which counts so many times, as the moments see it."""
        assert parameter.grad is not None
        grad = wide(parameter.grad) if by == 1.0 else wide(parameter.grad) * by
        if (scale := getattr(optimizer, "grad_scale", None)) is not None:  # a gradient scaler leaves it to a fused step
            grad = grad / scale
        grad = -grad if group.get("maximize", getattr(optimizer, "maximize", False)) else grad
        # Groups say themselves which decay it is from torch 2.7 on.
        decoupled = self.decoupled or group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
        if group["weight_decay"] and not decoupled:
            grad = grad.add(local(parameter), alpha=float(group["weight_decay"]))
        return grad

    def taken_over(self, group: Group, state: State) -> tuple[Tensor, float]:
        """Return the second moment that an optimizer has made itself, and the steps that it stands for."""
        steps = self.steps(group, state)
        return self.corrected(group, state, steps), steps

    def corrected(self, group: Group, state: State, steps: float) -> Tensor:
        """Return the mean of squares, after that many steps, without its bias."""
        return (wide(state[self.second]) / (1 - self.betas(group)[1] ** steps)).contiguous()

    def move(self, held: BareMoment, group: Group, grad: Tensor, steps: float) -> None:
        """Let V take in an exact mean gradient, for all steps since the last one."""
        held.move(grad, self.betas(group)[1], steps)

    def take_coded(self, held: Moment, group: Group, grad: Tensor) -> None:
        """Let V, which no exact gradient has moved yet, take in a coded one; zeros before count for nothing."""
        held.steps = min(held.steps, MOST_BRIEF - BRIEF) if held.steps < 1 else 0.0
        self.move(held, group, grad, BRIEF)

    def forget(self, held: Moment, group: Group) -> None:
        """Let V be what it begins with."""
        held.steps = 0.0
        held.moment.zero_()

    def clear_first(self, state: State) -> None:
        """Let the first moment be what it begins with."""
        if self.first:
            moment = local(state[self.first])
            with torch.inference_mode(moment.is_inference()):  # of a program that makes its steps so
                moment.zero_()

    def write(self, group: Group, state: State, grad: Tensor, held: Moment, now: float, *, exact: bool = False) -> None:
        """Set the second moment so that step number ``now``, with this gradient, divides by V's root, plus eps.

        Or by more, where an element would move by more than :data:`BOUND` learning rates, and where this gradient is
        many times that root: the optimizer adds its square to what it is given.

        Without ``unbiased``, what is divided by is less by the bias, as in the optimizer's own step.

        Args:
            exact: divide by V without :data:`FLOOR`.
        """
        second, first = local(state[self.second]), (wide(state[self.first]) if self.first else grad).contiguous()
        out = second if second.dtype is first.dtype and second.is_contiguous() else torch.empty_like(first)
        (beta1, beta2), least = self.betas(group), held.least(exact=exact)
        with on_its_device(out):
            ops.adam_hold_all(
                [out.view(-1)],
                [first.view(-1)],
                [grad.contiguous().view(-1)],
                [held.moment.view(-1)],
                None if least is None else [least.view(-1)],
                betas=(beta1, beta2),
                step=now,
                bound=BOUND if self.unbiased else BOUND * math.sqrt(1 - beta2**now),
                left=self.left if second.element_size() > 2 else 1.0,
            )
        if out is not second:
            second.copy_(out)


#: That of Adam and AdamW.
ADAM = Form()


def wide(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as numbers of at least 32 bits."""
    return (tensor := local(tensor)).to(torch.promote_types(tensor.dtype, torch.float32))
