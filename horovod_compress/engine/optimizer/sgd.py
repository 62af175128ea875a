"""Steps SGD by a kernel: weight decay, momentum, weights and the ratio of norms in one pass over memory.

Torch's own formula is a pass for each, and so is to take the ratio of norms out of gradients before it
(:mod:`.matching`); here that is a factor. What the optimizer keeps stays torch's own, so nothing is ever owed to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ..reducer import Reducer
from .second_moment import Group, names_of, places
from .step_hooks import ready
from .stepping import Batch, Stepping, may_step, plain

_BUFFER = "momentum_buffer"


class _SgdBatch(Batch):
    """Those of one group, with the momentum of all of them, or of none."""

    any_order = True

    def move(self, weights: Sequence[Tensor], kept: Sequence[Tensor] | None, grads: Sequence[Tensor]) -> None:
        group = self.group
        ops.sgd_step_all(
            weights,
            kept,
            grads,
            lr=float(group["lr"]),
            momentum=float(group["momentum"]),
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            by=self.signed,
            weight_decay=float(group["weight_decay"]),
        )


class SgdStepping(Stepping):
    """Moves the weights of SGD, from the step on in which it has all momentum that it needs.

    Args:
        named: parameters by name, as the reducer has them.
    """

    def __init__(self, optimizer: Any, reducer: Reducer, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(optimizer, partial(places, optimizer, names_of(named.items())))
        self._reducer = reducer
        self.resume()

    def resume(self) -> None:
        """Go on with whatever was loaded."""
        self._done = self._reducer.step - 1  # the last step whose results the optimizer has used

    def fits(self, group: Group, parameter: nn.Parameter, state: Mapping[str, Any]) -> bool:
        buffer = state.get(_BUFFER) if group["momentum"] else None
        return (buffer is not None or not group["momentum"]) and plain(group, parameter, buffer)

    def chosen_now(self) -> frozenset[str]:
        """Return the parameters that :meth:`prepare` moves in the coming step; the others are torch's."""
        return self.moved_here(self._reducer.next_step() - 1, self._done, self._reducer.settled)

    @torch.no_grad()
    def prepare(self, ratios: Mapping[str, float]) -> None:
        """Before the optimizer's own step, move what was chosen.

        Args:
            ratios: what gradients count times, unless that is 1.
        """
        step = self._reducer.next_step() - 1
        if not ready(self._optimizer, step, self._done, self._reducer.settled):
            return
        self._done = step
        for (group, parameter, name), state in self._fit:
            by = ratios.get(name, 1.0)
            batch = self._put(parameter, (id(group), by), partial(_SgdBatch, group=group, by=by))
            if group["momentum"]:
                batch.kept.append(state[_BUFFER])
        self.step(step)


def stepping_of(optimizer: Any, reducer: Reducer, named: Mapping[str, nn.Parameter], step: str) -> SgdStepping | None:
    """Return what moves the weights of an optimizer: SGD itself, after a method that a second moment is held for.

    With others, such as ``none``, a training has the bits that it has without this package.

    Args:
        named: the parameters that are exchanged, of any optimizer.
        step: "auto" or "torch".

    Raises:
        ConfigError: the option has no meaning.
    """
    if not may_step(optimizer, step, torch.optim.SGD) or reducer.world == 1:
        return None
    buckets = reducer.buckets
    codes = any(divides != "never" for divides in buckets.divides().values())
    return SgdStepping(optimizer, reducer, named) if codes else None
