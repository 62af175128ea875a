"""Steps an optimizer in one pass over memory, by a kernel; torch's formula makes several.

The hook before an optimizer's step moves the weights of the parameters that it can, with their moments, and hides their
gradients from the step that follows, which then moves the others: so its own hooks, schedulers and profiler see what
they always see. A hook after the step shows the gradients again. Adam's part is in :mod:`.adam`, SGD's in :mod:`.sgd`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ...ops.checksums import on_its_device
from ..shards import local
from .family import is_exactly
from .second_moment import Group, Slot
from .step_hooks import ready, synchronizes, uncompiled

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
        kept: of the optimizer's state, what the kernel reads and writes; empty for nothing.
    """

    group: Group
    by: float
    parameters: list[nn.Parameter] = field(default_factory=list)
    grads: list[Tensor] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)

    #: Whether elements may come in any order, if it is the same one for weights, what is kept, and gradients.
    any_order = False

    @property
    def signed(self) -> float:
        """What gradients count times on the way down."""
        return -self.by if self.group["maximize"] else self.by

    @torch.no_grad()
    def step(self) -> None:
        """Do the step with what this rank has of the parameters and of their gradients."""
        columns = [[*map(local, each)] for each in (self.parameters, self.kept, self.grads) if each]
        written = len(columns) - 1
        rows, copies = contiguous(columns, written, any_order=self.any_order)
        with on_its_device(columns[0][0]):
            self.move(rows[0], rows[1] if self.kept else None, rows[-1])
            for tensor, copy in copies:
                tensor.copy_(copy)
        for weight in columns[0]:
            torch.autograd.graph.increment_version(weight)

    def move(self, weights: Sequence[Tensor], kept: Sequence[Tensor] | None, grads: Sequence[Tensor]) -> None:
        """Call the kernel with contiguous tensors."""
        raise NotImplementedError


def contiguous(
    columns: list[list[Tensor]], written: int, *, any_order: bool
) -> tuple[list[list[Tensor]], list[tuple[Tensor, Tensor]]]:
    """Return tensors as kernels take them, and copies with the tensors that they have to be written back to.

    How tensors lie may be another matter on each rank, and must not choose the formula: its roundings would set ranks
    apart.

    Args:
        columns: of as many tensors each; those at the same place have one shape.
        written: so many columns are written to.
        any_order: tensors of the ``channels_last`` format, and other permuted ones, need no copy.
    """
    if all(all(map(Tensor.is_contiguous, column)) for column in columns):
        return columns, []
    rows, copies = [], []
    for given in zip(*columns, strict=True):
        weights = given[0]
        order = sorted(range(weights.dim()), key=weights.stride, reverse=True) if any_order else range(weights.dim())
        laid = [tensor.permute(tuple(order)) for tensor in given]
        row = [tensor.contiguous() for tensor in laid]  # itself, where it is
        copies += [each for each in zip(laid[:written], row[:written], strict=True) if each[0] is not each[1]]
        rows.append(row)
    return [*map(list, zip(*rows, strict=True))], copies


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
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []
        self._used: list[tuple[nn.Parameter, _Version, float]] = []  # gradients as a kernel was given them
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
            done, settled: see :func:`.step_hooks.ready`.
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
                spans.append(_span(local(parameter)))
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
        key = *key, grad.dtype, grad.get_device()
        batch = self._batches.get(key) or self._batches.setdefault(key, make())
        batch.parameters.append(parameter)
        batch.grads.append(grad)
        return batch

    def step(self, number: int) -> None:
        """Move what was chosen and added, and hide its gradients.

        Args:
            number: of the step whose results these are.
        """
        batches, self._batches, self._fit = [*self._batches.values()], {}, []
        self._hidden_in = number
        for batch in batches:  # also those that are not reached, where a kernel raises
            each = zip(batch.parameters, batch.grads, strict=True)
            self._used += [(parameter, _version_of(grad), batch.by) for parameter, grad in each]
        try:
            for batch in batches:
                batch.step()
                self._hidden += zip(batch.parameters, batch.grads, strict=True)
                for parameter in batch.parameters:
                    parameter.grad = None
        except BaseException:
            self.show()
            raise

    # ---- after a step, and where it is torch's turn ----

    def show(self) -> None:
        """Show the gradients again that were hidden."""
        hidden, self._hidden = self._hidden, []
        for parameter, grad in hidden:
            if parameter.grad is None:
                parameter.grad = grad

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
        """Leave the optimizer and its gradients as torch alone would have them."""
        self.hand_over()
        for handle in self._handles:
            handle.remove()


def _version_of(grad: Tensor) -> _Version:
    return weakref.ref(mine := local(grad)), mine._version


def _span(weights: Tensor) -> tuple[int, int]:
    """Return where a tensor lies, and how many bytes from its first element to the end of its last one."""
    if weights.is_contiguous() or not weights.numel():
        return weights.data_ptr(), weights.nbytes
    last = sum((size - 1) * stride for size, stride in zip(weights.shape, weights.stride(), strict=True))
    return weights.data_ptr(), (last + 1) * weights.element_size()


def plain(group: Group, parameter: nn.Parameter, kept: Tensor | None) -> bool:
    """Return whether the tensors of a parameter are of a kind that kernels move.

    How they lie does not count, see :func:`contiguous`.

    Args:
        kept: of its state.
    """
    if (grad := parameter.grad) is None or group.get("capturable") or group.get("differentiable"):
        return False
    weights, grad = local(parameter), local(grad)
    kind, where, shape = weights.dtype, weights.get_device(), weights.shape
    return (
        type(weights) in (nn.Parameter, Tensor)
        and kind in _TYPES
        and (weights.is_cpu or weights.is_cuda)
        and all(
            type(other) is Tensor
            and other.dtype is kind
            and other.layout is torch.strided
            and other.get_device() == where
            and other.shape == shape
            and not other.is_neg()
            for other in ((grad,) if kept is None else (grad, local(kept)))
        )
    )
