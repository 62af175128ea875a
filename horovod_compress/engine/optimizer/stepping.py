"""Steps Adam in one pass over memory, by a kernel that divides by what is held; torch's formula makes several.

The hook before an optimizer's step moves the weights and first moments of the parameters that it can, and hides their
gradients from the step that follows, which then moves the others: so its own hooks, schedulers and profiler see what
they always see. A hook behind the step shows the gradients again.

The optimizer's own second moment is not needed meanwhile, and so left alone. It is made where somebody may ask for it:
before ``state_dict()``, and before torch moves a parameter again.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import ConfigError
from ...ops.checksums import on_its_device
from ...ops.threads import on_one_thread
from ..shards import local
from .family import is_exactly, uncompiled
from .second_moment import ADAM, BOUND, Group, Moment, Slot, wide

_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def may_step(optimizer: Any, step: str) -> bool:
    """Return whether an optimizer is one that is known to the letter, and its user leaves its step to us.

    Raises:
        ConfigError: the option has no meaning.
    """
    if step not in ("auto", "torch"):
        raise ConfigError(f'step should be "auto" or "torch", got {step!r}')
    return step == "auto" and is_exactly(optimizer, torch.optim.Adam, torch.optim.AdamW)


@dataclass
class _Owed:
    """A second moment that the optimizer lacks, of a parameter that was moved.

    Attributes:
        state: where it is to be; after a load, the optimizer has another.
        now: the number of the last step; where the optimizer has another, somebody else has set its state.
        exact: that step divided by V as it is.
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
        wanted = self.held.moment if self.exact else self.held.squares()
        local(self.state[ADAM.second]).copy_(torch.maximum(wanted, least).mul_(1 - beta2**now))


@dataclass
class _Batch:
    """What one call of the kernel moves: parameters of one group, whose steps have one number.

    Attributes:
        now: that number, from 1 on.
        exact: divide by V as it is.
        by: what gradients count times.
    """

    group: Group
    now: float
    exact: bool
    by: float
    parameters: list[nn.Parameter] = field(default_factory=list)
    firsts: list[Tensor] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    held: list[Moment] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def move(self, *, decoupled: bool) -> None:
        """Do the step."""
        group, weights = self.group, [*map(local, self.parameters)]
        with on_its_device(weights[0]):
            ops.adam_step_all(
                weights,
                self.firsts,
                [*map(local, self.grads)],
                [held.moment for held in self.held],
                None if self.exact else [held.floor for held in self.held],
                betas=ADAM.betas(group),
                step=self.now,
                bound=BOUND,
                lr=float(group["lr"]),
                eps=float(group["eps"]),
                by=-self.by if group["maximize"] else self.by,
                weight_decay=float(group["weight_decay"]),
                decoupled=bool(group.get("decoupled_weight_decay", decoupled)),  # groups have it from torch 2.7 on
            )
        torch._foreach_add_(self.counts, 1)
        for weight in weights:
            torch.autograd.graph.increment_version(weight)


class Stepping:
    """Moves the weights of one optimizer, for which :func:`may_step` was true.

    Args:
        places: returns its parameters that are exchanged, with their groups.
    """

    def __init__(self, optimizer: Any, places: Callable[[], Iterator[Slot]]) -> None:
        self._optimizer, self._places = optimizer, places
        self._hidden_in = -1
        self._owed: dict[str, _Owed] = {}
        self._batches: dict[tuple[object, ...], _Batch] = {}
        self._hidden: list[tuple[nn.Parameter, Tensor, float]] = []
        self._used: list[tuple[nn.Parameter, _Version, float]] = []  # gradients that were shown again
        self._process = os.getpid()
        if isinstance(other := getattr(vars(optimizer).get("__getstate__"), "__self__", None), Stepping):
            other.end()  # that of another compression, which was not closed
        self._spans: tuple[list[tuple[int, int]], bool] = [], True
        show, pay = uncompiled(lambda *given: self.show()), uncompiled(lambda *given: self.pay())
        self._handles = [optimizer.register_step_post_hook(show), optimizer.register_state_dict_pre_hook(pay)]
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[0].id, last=False)  # others look at gradients
        optimizer.__getstate__ = self._pickled

    def _pickled(self) -> Any:
        """Return what is pickled or copied of the optimizer."""
        self.pay()
        return type(self._optimizer).__getstate__(self._optimizer)

    def hides(self, number: int) -> bool:
        """Return whether the gradients of a step are hidden: it is under way, or has raised."""
        return bool(self._hidden) and self._hidden_in == number

    # ---- before a step ----

    def chosen(self, names: Collection[str]) -> frozenset[str]:
        """Return the parameters that are moved here in the coming step; others with a gradient are torch's.

        Args:
            names: those whose second moment is held.
        """
        self._hidden, self._used, self._batches = [], [], {}  # what a step that raised has left
        fit: set[str] = set()
        spans = []
        scaled = [getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf")]  # left to a fused step
        slots = [slot for slot in self._places() if slot[1].grad is not None]
        for group, parameter, name in slots if scaled == [None, None] else ():
            if name in names and _fits(group, parameter, self._optimizer.state[parameter]):
                fit.add(name)
                weights = local(parameter)
                spans.append((weights.data_ptr(), weights.nbytes))
        if not self._are_apart(spans):
            fit.clear()
        self.pay([name for _, _, name in slots if name not in fit])
        return frozenset(fit)

    def _are_apart(self, spans: list[tuple[int, int]]) -> bool:
        """Return whether no two weights share memory; looked at again when they have moved."""
        if spans != self._spans[0]:
            places = sorted((at, at + size) for at, size in spans)
            self._spans = spans, all(end <= at for (_, end), (at, _) in pairwise(places))
        return self._spans[1]

    def add(self, slot: Slot, held: Moment, now: float, *, exact: bool, by: float) -> None:
        """Let :meth:`step` move a parameter, one of those that were chosen; see :class:`_Batch`."""
        (group, parameter, name), grad = slot, slot[1].grad
        assert grad is not None
        state, key = self._optimizer.state[parameter], (id(group), now, exact, by, grad.dtype, grad.device)
        batch = self._batches.get(key) or self._batches.setdefault(key, _Batch(group, now, exact, by))
        batch.parameters.append(parameter)
        batch.firsts.append(local(state[ADAM.first]))
        batch.grads.append(grad)
        batch.held.append(held)
        batch.counts.append(state["step"])
        self._owed[name] = _Owed(group, parameter, state, held, now, exact)

    def step(self, number: int) -> None:
        """Move what was added, and hide its gradients.

        Args:
            number: of the step whose results these are.
        """
        batches, self._batches = self._batches, {}
        self._hidden_in = number
        for batch in batches.values():
            batch.move(decoupled=isinstance(self._optimizer, torch.optim.AdamW))
            for parameter, grad in zip(batch.parameters, batch.grads, strict=True):
                self._hidden.append((parameter, grad, batch.by))
                parameter.grad = None

    # ---- behind a step, and where it is torch's turn ----

    def show(self) -> None:
        """Show the gradients again that were hidden."""
        hidden, self._hidden = self._hidden, []
        for parameter, grad, by in hidden:
            if parameter.grad is None:
                parameter.grad = grad
                self._used.append((parameter, _version_of(grad), by))

    @torch.no_grad()
    def pay(self, names: Collection[str] | None = None) -> None:
        """Make the optimizer's own second moments of these parameters, where it lacks them; by default of all."""
        if names is None:
            self.show()  # a step may have raised
        forked = os.getpid() != self._process  # of several threads, all but this one are missing there
        with on_one_thread() if forked else contextlib.nullcontext():
            for name in list(self._owed) if names is None else names:
                owed = self._owed.pop(name, None)
                if owed is not None and self._optimizer.state.get(owed.parameter) is owed.state:
                    owed.pay()

    @torch.no_grad()
    def hand_over(self) -> None:
        """Let torch do a step for which nothing was exchanged."""
        self.pay()
        for parameter, version, by in self._used:
            if by != 1.0 and parameter.grad is not None and version == _version_of(parameter.grad):
                parameter.grad.mul_(by)
        self._used = []

    def end(self) -> None:
        """Leave the optimizer as torch alone would have it."""
        self.pay()
        for handle in self._handles:
            handle.remove()
        if vars(self._optimizer).get("__getstate__") == self._pickled:
            del self._optimizer.__getstate__


#: A tensor, which nothing keeps alive for that, and what changes when its values do.
_Version = tuple["weakref.ref[Tensor]", int]


def _version_of(grad: Tensor) -> _Version:
    return weakref.ref(mine := local(grad)), mine._version


def _fits(group: Group, parameter: nn.Parameter, state: Mapping[str, Any]) -> bool:
    """Return whether the kernel does with a parameter what torch's step does."""
    first = state.get(ADAM.first)
    if parameter.grad is None or not isinstance(first, Tensor):
        return False
    weights, grad, first = map(local, (parameter, parameter.grad, first))
    kind, device = weights.dtype, weights.device
    return (
        type(grad) is type(first) is Tensor
        and type(weights) in (nn.Parameter, Tensor)
        and kind in _TYPES
        and device.type in ("cpu", "cuda")
        and grad.layout is torch.strided
        and grad.dtype is first.dtype is kind
        and grad.device == first.device == device
        and grad.shape == first.shape == weights.shape
        and weights.is_contiguous()
        and grad.is_contiguous()
        and first.is_contiguous()
        and not (group.get("amsgrad") or group.get("capturable") or group.get("differentiable"))
    )
