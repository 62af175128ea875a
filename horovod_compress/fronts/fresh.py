"""Gradients that autograd has just made, in memory that it may still need, or that it has given to two parameters.

Where a parameter enters a sum by a view of it, as ``positions.unsqueeze(0)`` does, its gradient is a view of the sum's,
which goes on to other parameters. Torch leaves it there, as nobody writes to it before the pass is over. An exchange
does, so such a gradient is copied first. Memory that a program has laid gradients into is its own matter.

One hook for each parameter sees to it, before autograd takes the gradient: torch keeps a copy as it is, and whatever
comes after that, hooks of the program and of a framework, finds the gradient where it stays.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from ..engine.optimizer.step_hooks import uncompiled
from ..engine.shards import is_divided


class FreshGradients:
    """Copies gradients out of memory that is not theirs alone, before their results are written there.

    Args:
        parameters: whose gradients are exchanged.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = {id(one): one for one in parameters if not is_divided(one)}  # those have their own memory
        self._none: set[int] = set()  # by identity: what was brought none instead of a gradient
        self._alone = _alone()
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        for key, parameter in self._parameters.items():
            with needing_gradient(parameter):
                self._handles.append(parameter.register_hook(_looking(self, key)))

    def close(self) -> None:
        """Look at gradients no more; safe to call twice."""
        _remove(self._handles)

    def look(self, key: int, grad: Tensor | None) -> Tensor | None:
        """Look at what comes for a parameter.

        Returns:
            what torch is to take in its place; None to leave it.
        """
        if grad is None:
            self._none.add(key)
            return None
        self._none.discard(key)
        if self._parameters[key].grad is not None or grad.layout != torch.strided:
            return None  # it is added to what is there
        return grad.clone() if _is_shared(grad, self._alone) else None

    def is_none(self, parameter: nn.Parameter) -> bool:
        """Return whether a function of the program has brought no gradient where one was expected."""
        return id(parameter) in self._none


def _looking(watch: FreshGradients, key: int) -> Callable[[Tensor | None], Tensor | None]:
    """Return a hook that looks at a gradient; torch.autograd.grad calls it as well, which may then return a copy."""
    known = weakref.ref(watch)  # which has the parameters, which hold the hook

    def look(grad: Tensor | None) -> Tensor | None:
        found = known()
        return None if found is None else found.look(key, grad)

    return unserializable_hook(uncompiled(look))  # else torch would warn as it saves


@contextlib.contextmanager
def needing_gradient(parameter: nn.Parameter) -> Iterator[None]:
    """Let torch take hooks of a parameter, also of a frozen one."""
    needs, _ = parameter.requires_grad, parameter.requires_grad_(True)
    try:
        yield
    finally:
        parameter.requires_grad_(needs)


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


#: Return the references to a storage, and to a tensor; they are private in torch, and the second one is young.
_references: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_uses: Callable[[Tensor], int] | None = getattr(Tensor, "_use_count", None)


class Counts(NamedTuple):
    """References to the memory of a gradient, and to the tensor that it is a view of: none, where it is no view."""

    memory: int
    base: int


def _is_shared(grad: Tensor, alone: Mapping[bool, Counts]) -> bool:
    """Return whether something else refers to the memory of a gradient; yes, where torch cannot tell.

    Torch itself copies a gradient that others have as the same tensor, which is no reference more to the memory.
    """
    most = alone.get(grad._is_view())
    if most is None or not grad.untyped_storage().resizable():  # the memory of another library, such as NumPy
        return True
    found = _counts(grad)
    return found.memory > most.memory or found.base > most.base


def _counts(grad: Tensor) -> Counts:
    assert _references
    base = grad._base
    return Counts(_references(grad.untyped_storage()._cdata), 0 if base is None else _uses(base) if _uses else 1)


@cache
def _alone() -> Mapping[bool, Counts]:
    """Count, in hooks, the references to what a gradient has alone; by whether it is a view.

    Small gradients are counted, as the numbers depend on torch's version. What torch does not count is left out.
    """
    if not _references:
        return {}
    found: dict[str, Counts] = {}

    def noting(name: str) -> Callable[[Tensor], None]:
        return lambda grad: found.update({name: _counts(grad)})

    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.ones(*shape, device="cpu", dtype=torch.float32))

    with torch.inference_mode(False), torch.enable_grad():
        whole, view, shared, given = parameter(1, 2), parameter(2, 1), parameter(2), parameter(1, 2)
        for name, one in {"whole": whole, "view": view, "shared": shared}.items():
            one.register_hook(noting(name))
        (whole * given + view.t() * given + shared.unsqueeze(0)).square().sum().backward()
        before, other = _counts(given).memory, given.detach()
        if _counts(other).memory == before:
            return {}
    known = {False: found["whole"]}
    return known | {True: found["view"]} if found["view"].base < found["shared"].base else known
