"""Steps Adam by a kernel, where its second moment is held: see :mod:`.stepping`.

The kernel divides by what is held. The optimizer's own second moment is not needed meanwhile, and so left alone. It is
made where somebody may ask for it: before ``state_dict()``, and before torch moves a parameter again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...ops.threads import on_one_thread
from ..shards import local
from .second_moment import ADAM, BOUND, Group, Moment, Slot, wide
from .step_hooks import uncompiled
from .stepping import Batch, Stepping, plain


@dataclass
class _Owed:
    """A second moment that the optimizer lacks, of a parameter that was moved.

    Attributes:
        state: where it is to be; after a load, the optimizer has another.
        now: the number of the last step; where the optimizer has another, somebody else has set its state.
        exact: that step divided by V without :data:`.second_moment.FLOOR`.
    """

    group: Group
    parameter: nn.Parameter
    state: dict[str, Any]
    held: Moment
    now: float
    exact: bool

    def pay(self) -> None:
        """Leave what torch's own step would have left, but for what the last gradient adds."""
        now, (beta1, beta2) = self.now, ADAM.betas(self.group)
        if ADAM.steps(self.group, self.state) != now:
            return
        least = (wide(self.state[ADAM.first]) / ((1 - beta1**now) * BOUND)).square_()
        wanted = self.held.squares(exact=self.exact)
        second = local(self.state[ADAM.second])
        with torch.inference_mode(second.is_inference()):  # of a program that makes its steps so
            second.copy_(torch.maximum(wanted, least).mul_(1 - beta2**now))


@dataclass(kw_only=True)
class _AdamBatch(Batch):
    """Those whose steps have one number, too.

    Attributes:
        now: that number, from 1 on.
        decoupled: how the class has its weight decay.
        floors: what V counts for at least, by row; none where it counts as it is.
        owed: by name, what the optimizer lacks once they are moved, and where that is noted then.
    """

    now: float
    decoupled: bool
    held: list[Moment] = field(default_factory=list)
    floors: list[Tensor] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)
    owed: dict[str, _Owed] = field(default_factory=dict)
    ledger: dict[str, _Owed]

    def move(self, weights: Sequence[Tensor], kept: Sequence[Tensor] | None, grads: Sequence[Tensor]) -> None:
        assert kept is not None
        group = self.group
        ops.adam_step_all(
            weights,
            kept,
            grads,
            [held.moment for held in self.held],
            self.floors or None,
            betas=ADAM.betas(group),
            step=self.now,
            bound=BOUND,
            lr=float(group["lr"]),
            eps=float(group["eps"]),
            by=self.signed,
            weight_decay=float(group["weight_decay"]),
            decoupled=bool(group.get("decoupled_weight_decay", self.decoupled)),  # groups have it from torch 2.7 on
        )
        torch._foreach_add_(self.counts, 1)
        self.ledger |= self.owed  # not before: where a kernel raises, that of the step before still counts


class AdamStepping(Stepping):
    """Moves the weights of Adam or AdamW."""

    def __init__(self, optimizer: Any, places: Callable[[], Iterator[Slot]]) -> None:
        super().__init__(optimizer, places)
        self._owed: dict[str, _Owed] = {}
        self._process = os.getpid()
        if isinstance(other := getattr(vars(optimizer).get("__getstate__"), "__self__", None), Stepping):
            other.end()  # that of another compression, which was not closed
        self._handles.append(optimizer.register_state_dict_pre_hook(uncompiled(lambda *given: self.pay())))
        optimizer.__getstate__ = self._pickled

    def _pickled(self) -> Any:
        """Return what is pickled or copied of the optimizer."""
        self.pay()
        return type(self._optimizer).__getstate__(self._optimizer)

    def fits(self, group: Group, parameter: nn.Parameter, state: Mapping[str, Any]) -> bool:
        first = state.get(ADAM.first)
        return isinstance(first, Tensor) and plain(group, parameter, first) and not group.get("amsgrad")

    def add(self, slot: Slot, held: Moment, now: float, *, exact: bool, by: float) -> None:
        """Let :meth:`step` move a parameter, one of those that were chosen; see :class:`_AdamBatch`."""
        group, parameter, name = slot
        state, decoupled = self._optimizer.state[parameter], isinstance(self._optimizer, torch.optim.AdamW)
        least = held.least(exact=exact)
        batch = self._put(
            parameter,
            (id(group), now, least is None, by),
            lambda: _AdamBatch(group=group, by=by, now=now, decoupled=decoupled, ledger=self._owed),
        )
        assert isinstance(batch, _AdamBatch)
        batch.kept.append(state[ADAM.first])
        batch.held.append(held)
        batch.floors += [] if least is None else [least]
        batch.counts.append(state["step"])
        batch.owed[name] = _Owed(group, parameter, state, held, now, exact)

    @torch.no_grad()
    def pay(self, names: Collection[str] | None = None) -> None:
        """Make the optimizer's own second moments of these parameters, where it lacks them; by default of all."""
        super().pay(names)
        forked = os.getpid() != self._process  # of several threads, all but this one are missing there
        with on_one_thread() if forked else contextlib.nullcontext():
            for name in list(self._owed) if names is None else names:
                owed = self._owed.pop(name, None)
                if owed is not None and self._optimizer.state.get(owed.parameter) is owed.state:
                    owed.pay()

    def end(self) -> None:
        super().end()
        if vars(self._optimizer).get("__getstate__") == self._pickled:
            del self._optimizer.__getstate__
