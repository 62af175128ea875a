"""Steps an optimizer in one pass over memory, by a kernel; torch's formula makes several.

The hook before an optimizer's step moves the weights of the parameters that it can, with their moments, and hides their
gradients from the step that follows, which then moves the others: so its own hooks, schedulers and profiler see what
they always see. A hook behind the step shows the gradients again. SGD's are in :mod:`.sgd`.

Of Adam, the kernel divides by what is held. Its own second moment is not needed meanwhile, and so left alone. It is
made where somebody may ask for it: before ``state_dict()``, and before torch moves a parameter again.
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
from .family import is_exactly, ready, synchronizes, uncompiled
from .second_moment import ADAM, BOUND, Group, Moment, Slot, wide

_TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def may_step(optimizer: Any, step: str, *kinds: type) -> bool:
    """Return whether an optimizer is one of these, known to the letter, and its user leaves its step to us.

    Raises:
        ConfigError: the option has no meaning.
    """
    if step not in ("auto", "torch"):
        raise ConfigError(f'step should be "auto" or "torch", got {step!r}')
    return step == "auto" and is_exactly(optimizer, *kinds)


@dataclass(kw_only=True)
class Batch:
    """What one call of a kernel moves: parameters of one group.

    Attributes:
        by: what gradients count times.
    """

    group: Group
    by: float
    parameters: list[nn.Parameter] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)

    @property
    def signed(self) -> float:
        """What gradients count times on the way down."""
        return -self.by if self.group["maximize"] else self.by

    def move(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Do the step with what this rank has of the parameters and of their gradients."""
        raise NotImplementedError


#: A tensor, which nothing keeps alive for that, and what changes when its values do.
_Version = tuple["weakref.ref[Tensor]", int]


class Stepping:
    """Moves the weights of one optimizer, for which :func:`may_step` was true.

    Args:
        places: returns its parameters that are exchanged, with their groups.
    """

    def __init__(self, optimizer: Any, places: Callable[[], Iterator[Slot]]) -> None:
        self._optimizer, self._places = optimizer, places
        self._hidden_in = -1
        self._fit: list[tuple[Slot, Mapping[str, Any]]] = []  # what was chosen, with the optimizer's state
        self._batches: dict[tuple[object, ...], Batch] = {}
        self._hidden: list[tuple[nn.Parameter, Tensor, float]] = []
        self._used: list[tuple[nn.Parameter, _Version, float]] = []  # gradients that were shown again
        self._spans: tuple[list[tuple[int, int]], bool] = [], True
        self._handles = [optimizer.register_step_post_hook(uncompiled(lambda *given: self.show()))]
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[0].id, last=False)  # others look at gradients

    def fits(self, group: Group, parameter: nn.Parameter, state: Mapping[str, Any]) -> bool:
        """Return whether the kernel does with a parameter what torch's step does."""
        raise NotImplementedError

    # ---- before a step ----

    def moved_here(
        self, step: int, done: int, settled: Callable[[], bool], names: Collection[str] | None = None
    ) -> frozenset[str]:
        """Return the parameters that are moved here in the coming step; others with a gradient are torch's.

        Args:
            step: the one whose results the optimizer has.
            done, settled: see :func:`.family.ready`.
            names: those that may be; None for all.
        """
        if self._hidden and self._hidden_in == step:  # it is under way, or has raised
            return frozenset()  # Horovod's optimizer calls torch's: a hook comes twice
        if ready(self._optimizer, step, done, settled):
            return self.chosen(names)
        if step <= done and not synchronizes(self._optimizer):
            self.hand_over()
        return frozenset()

    def chosen(self, names: Collection[str] | None = None) -> frozenset[str]:
        """Return those of some parameters that the kernel can move now."""
        self._hidden, self._used, self._batches = [], [], {}  # what a step that raised has left
        self._fit = []
        spans = []
        scaled = [getattr(self._optimizer, name, None) for name in ("grad_scale", "found_inf")]  # left to a fused step
        slots = [slot for slot in self._places() if slot[1].grad is not None]
        for slot in slots if scaled == [None, None] else ():
            group, parameter, name = slot
            if names is not None and name not in names:
                continue
            state = self._optimizer.state.get(parameter, {})  # a look-up by [] would make one
            if self.fits(group, parameter, state):
                self._fit.append((slot, state))
                weights = local(parameter)
                spans.append((weights.data_ptr(), weights.nbytes))
        if not self._are_apart(spans):
            self._fit = []
        fit = frozenset(name for (_, _, name), _ in self._fit)
        self.pay([name for _, _, name in slots if name not in fit])
        return fit

    def _are_apart(self, spans: list[tuple[int, int]]) -> bool:
        """Return whether no two weights share memory; looked at again when they have moved."""
        if spans != self._spans[0]:
            places = sorted((at, at + size) for at, size in spans)
            self._spans = spans, all(end <= at for (_, end), (at, _) in pairwise(places))
        return self._spans[1]

    def _put(self, parameter: nn.Parameter, key: tuple[object, ...], make: Callable[[], Batch]) -> Batch:
        """Let :meth:`step` move a parameter with others of its kind; return with which.

        Args:
            key: what is equal for all that go together, beside the kind of their numbers.
        """
        grad = parameter.grad
        assert grad is not None
        key = *key, grad.dtype, grad.device
        batch = self._batches.get(key) or self._batches.setdefault(key, make())
        batch.parameters.append(parameter)
        batch.grads.append(grad)
        return batch

    def step(self, number: int) -> None:
        """Move what was chosen and added, and hide its gradients.

        Args:
            number: of the step whose results these are.
        """
        batches, self._batches, self._fit = self._batches, {}, []
        self._hidden_in = number
        for batch in batches.values():
            weights = [*map(local, batch.parameters)]
            with on_its_device(weights[0]):
                batch.move(weights, [*map(local, batch.grads)])
            for weight in weights:
                torch.autograd.graph.increment_version(weight)
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

    def pay(self, names: Collection[str] | None = None) -> None:
        """Let the optimizer's state of these parameters be what torch's step goes on from; by default of all."""
        if names is None:
            self.show()  # a step may have raised

    @torch.no_grad()
    def hand_over(self) -> None:
        """Let torch do a step for which nothing was exchanged."""
        self.pay()
        for parameter, (known, version), by in self._used:
            if by == 1.0 or parameter.grad is None:
                continue
            grad = local(parameter.grad)
            if known() is grad and version == grad._version:  # tensors would be compared by their values
                parameter.grad.mul_(by)
        self._used = []

    def end(self) -> None:
        """Leave the optimizer as torch alone would have it."""
        self.pay()
        for handle in self._handles:
            handle.remove()


def _version_of(grad: Tensor) -> _Version:
    return weakref.ref(mine := local(grad)), mine._version


def plain(group: Group, parameter: nn.Parameter, kept: Tensor | None) -> bool:
    """Return whether the tensors of a parameter are of a kind that kernels move.

    Args:
        kept: of its state.
    """
    if parameter.grad is None:
        return False
    weights, *others = map(local, (parameter, parameter.grad) if kept is None else (parameter, parameter.grad, kept))
    return (
        type(weights) in (nn.Parameter, Tensor)
        and weights.dtype in _TYPES
        and weights.device.type in ("cpu", "cuda")
        and weights.is_contiguous()
        and all(
            type(other) is Tensor
            and other.layout is torch.strided
            and other.dtype is weights.dtype
            and other.device == weights.device
            and other.shape == weights.shape
            and other.is_contiguous()
            for other in others
        )
        and not (group.get("capturable") or group.get("differentiable"))
    )


# ---- Adam ----------------------------------------------------------------------------------------


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


@dataclass(kw_only=True)
class _AdamBatch(Batch):
    """Those whose steps have one number, too.

    Attributes:
        now: that number, from 1 on.
        exact: divide by V as it is.
        decoupled: how the class has its weight decay.
    """

    now: float
    exact: bool
    decoupled: bool
    firsts: list[Tensor] = field(default_factory=list)
    held: list[Moment] = field(default_factory=list)
    counts: list[Tensor] = field(default_factory=list)

    def move(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        group = self.group
        ops.adam_step_all(
            weights,
            self.firsts,
            grads,
            [held.moment for held in self.held],
            None if self.exact else [held.floor for held in self.held],
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
        batch = self._put(
            parameter,
            (id(group), now, exact, by),
            lambda: _AdamBatch(group=group, by=by, now=now, exact=exact, decoupled=decoupled),
        )
        assert isinstance(batch, _AdamBatch)
        batch.firsts.append(local(state[ADAM.first]))
        batch.held.append(held)
        batch.counts.append(state["step"])
        self._owed[name] = _Owed(group, parameter, state, held, now, exact)

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
