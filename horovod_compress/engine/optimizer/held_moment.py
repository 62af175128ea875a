"""What is held of one parameter's second moment, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ..kept import Kept
from . import second_moment as moments
from .saved_moments import tensors_of
from .second_moment import Moment

#: How many exchanges an optimizer has left unused, whether all of them were exact, and whether the last one was.
Left = Mapping[str, Any]
#: What codecs divide by is at least this part of the root mean square of the tensor.
LEAST = 1e-6
#: And at least this part of the root mean square of the rows that have had a gradient. A row of which V is small has
#: most often seldom had any: divided by that, the next one would set the scale of all others, or take their place.
CODE_FLOOR = 0.3


@dataclass
class HeldMoment(Moment):
    """The second moment of one parameter; equal on every rank.

    Attributes:
        since: the optimizer's step of the last exact round, and one more for each surge that was taken in since then:
            the next exact round counts for the steps that are left, or for fewer, see
            :func:`.second_moment.counted`. Of coded gradients alone, that of the last one.
        divides: gradients are divided before they are encoded, not only in the optimizer.
        zero_group: see ``Layout.zero_groups``.
        usual: the mean square of the elements of coded results that are looked at, a running mean; 0 before the first.
        unmoved: the elements that coded rounds leave out.
        divisor: what gradients are divided by, in units of its root mean square, flat.
        size: the mean of the second moment where results are looked at; None until it is needed.
        is_zero: it has taken in zeros only; None until it is needed.
    """

    since: float
    eps: float
    divides: bool
    zero_group: int = 1
    usual: float = 0.0
    unmoved: Tensor | None = field(init=False, default=None)
    divisor: Tensor | None = field(init=False)
    size: float | None = field(init=False, default=None)
    is_zero: bool | None = field(init=False, default=None)

    @property
    def is_coded(self) -> bool:
        """Whether it is made of coded gradients alone, see :data:`.second_moment.BRIEF`."""
        return self.steps < 1

    def regroup(self, zero_group: int) -> None:
        """Take note that other zeros stay zeros; of coded gradients alone, no element is left out."""
        self.zero_group = zero_group
        self.unmoved = None if self.is_coded else moments.unmoved(self.moment, zero_group, self.unmoved)

    def state(self) -> dict[str, Any]:
        usual = {"usual": self.usual} if self.usual else {}
        return super().state() | {"since": self.since, "eps": self.eps, "divides": self.divides} | usual

    def like(self, result: Tensor) -> Tensor:
        """Return a gradient as large as a coded result in each row, and else as the second moment has them.

        Within a row, the differences of a coded result are those of its code.
        """
        squares = moments.mean_power(result.contiguous(), 2, self.floor.numel())
        squares = squares.to(self.moment.dtype).view(self.floor.shape)
        return ops.take_roots((self.moment * (squares * (moments.FLOOR**2) / self.floor)).nan_to_num_(0.0, 0.0))

    def once(self, grad: Tensor, steps: float) -> Tensor:
        """Return an exact gradient whose square counts for so many steps, where elements were left out but for one.

        What comes there is the sum of what has waited: those steps have no other gradient.
        """
        if self.unmoved is None or steps <= 1:
            return grad
        found = grad.clone(memory_format=torch.contiguous_format)
        found.view(-1)[self.unmoved] *= steps**-0.5
        return found

    def derive(self) -> None:
        super().derive()
        self.regroup(self.zero_group)
        self.divisor = self.size = self.is_zero = None
        if not self.divides:
            return
        least = torch.maximum(self.floor, self.usual_floor() * (CODE_FLOOR / moments.FLOOR) ** 2)
        divisor = ops.take_roots(torch.maximum(self.moment, least)).add_(self.eps).view(-1)
        # Of the order of 1, so that what is encoded has the size of gradients, in float16 too.
        size = ops.take_roots(moments.mean_power(divisor, 2)).to(divisor.dtype)
        # None is larger than the root of their number, but where the second moment has overflowed.
        most = max(1.0, 2 * divisor.numel() ** 0.5)
        self.divisor = divisor.div_(size.clamp_(min=torch.finfo(divisor.dtype).tiny)).clamp_(min=LEAST, max=most)


def loaded(saved: Mapping[str, Any], device: torch.device, zero_group: int = 1) -> HeldMoment:
    """Return a second moment of what :meth:`HeldMoment.state` returned."""
    return HeldMoment(**{**saved, **tensors_of(saved, device)}, zero_group=zero_group)


def give_back(state: Mapping[str, Mapping[str, Any]], kept: Kept) -> None:
    """Carry what waits over to the units of gradients, where a second moment was loaded that nobody holds."""
    factors = {name: HeldMoment(**saved).divisor for name, saved in state.items()}
    kept.convert({name: factor for name, factor in factors.items() if factor is not None})


def note_units(factors: dict[str, Tensor], name: str, before: Tensor | None, after: Tensor | None) -> None:
    """Note by what to multiply what waits for a tensor: it has other units now, None stands for those of gradients."""
    if before is not None:
        factors[name] = before if after is None else before / after
    elif after is not None:
        factors[name] = after.reciprocal()
