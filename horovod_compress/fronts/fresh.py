"""Gradients that autograd has just made, in memory that it may still need, or that it has given to two parameters.

Where a parameter enters a sum by a view of it, as ``positions.unsqueeze(0)`` does, its gradient is a view of the sum's,
which goes on to other parameters. Torch leaves it there, as nobody writes to it before the pass is over. An exchange
does, so such a gradient is copied first. Memory that a program has laid gradients into is its own matter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from ..engine.optimizer.family import uncompiled
from ..engine.shards import is_divided
from .session import weakly

#: Registers the hook by which a framework takes gradients; returns what has to stay.
Hook = Callable[[nn.Parameter], object]


def _no_hook(parameter: nn.Parameter) -> None:
    """Register nothing."""


class FreshGradients:
    """Copies gradients out of memory that is not theirs alone, before their results are written there.

    Args:
        parameters: whose gradients are exchanged.
        framework: it gets gradients after :meth:`separate` does, and torch keeps references for that.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], framework: Hook = _no_hook) -> None:
        self._parameters = {id(one): one for one in parameters if not is_divided(one)}  # those have their own memory
        # By identity: what had no gradient when its last one came, and what was brought none instead of one.
        self._made: set[int] = set()
        self._none: set[int] = set()
        self._alone = _references_alone(framework)
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        for key, parameter in self._parameters.items():
            with needing_gradient(parameter):
                self._handles.append(parameter.register_hook(_noting(self, key)))

    def follow(self) -> None:
        """Have each gradient looked at as soon as it is there, where nobody calls :meth:`separate`."""
        look = uncompiled(weakly(self.separate))
        for parameter in self._parameters.values():
            with needing_gradient(parameter):
                self._handles.append(parameter.register_post_accumulate_grad_hook(look))

    def close(self) -> None:
        """Look at gradients no more."""
        _remove(self._handles)

    def note(self, key: int, *, none: bool) -> None:
        """Note whether the gradient that comes makes that of a parameter, or will be added to it, or is none."""
        if none:
            self._none.add(key)
            return
        self._none.discard(key)
        if self._parameters[key].grad is None:
            self._made.add(key)
        else:
            self._made.discard(key)

    def is_none(self, parameter: nn.Parameter) -> bool:
        """Return whether a function of the program has brought no gradient where one was expected."""
        return id(parameter) in self._none

    def separate(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd has just left in memory of others; to be called in a hook of the parameter."""
        grad = parameter.grad
        if id(parameter) not in self._made or grad is None or grad.layout != torch.strided or grad._is_view():
            return
        if _is_shared(grad, self._alone):
            parameter.grad = grad.clone()


def _noting(watch: FreshGradients, key: int) -> Callable[[Tensor | None], Tensor | None]:
    """Return a hook that notes a gradient; torch.autograd.grad calls it as well, which changes none."""
    known = weakref.ref(watch)  # which has the parameters, which hold the hook

    def note(grad: Tensor | None) -> Tensor | None:
        if (found := known()) is not None:
            found.note(key, none=grad is None)
        return None if grad is None else _without_base(grad)

    return unserializable_hook(uncompiled(note))  # else torch would warn as it saves


def _without_base(grad: Tensor) -> Tensor | None:
    """Return a view as a tensor that keeps no other one: a framework's hook keeps what came, and so the other."""
    return grad.detach() if grad._is_view() and not torch.is_grad_enabled() else None


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
        handle.remove()  # as often as one likes


#: Returns the references to a storage; it is private in torch.
_references: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _is_shared(grad: Tensor, alone: int) -> bool:
    """Return whether something else refers to the memory of a gradient; yes, where torch cannot tell.

    Args:
        alone: see :func:`_references_alone`.
    """
    memory = grad.untyped_storage()
    its_own = memory.resizable()  # else another library's, such as an array of NumPy
    return not its_own or not alone or not _references or _references(memory._cdata) > alone


@cache
def _references_alone(framework: Hook) -> int:
    """Return how many references torch counts to memory that one gradient has alone, in a hook; 0 if it does not.

    The number depends on torch's version, and on the hooks behind.
    """
    if not (count := _references):
        return 0
    found = {}

    def look(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        found[name] = count(parameter.grad.untyped_storage()._cdata)

    with torch.inference_mode(False), torch.enable_grad():
        alone, shared, given = (torch.ones(1, 2, device="cpu", dtype=torch.float32) for _ in range(3))
        mine = {"alone": nn.Parameter(alone), "shared": nn.Parameter(shared[0])}
        kept = [framework(one) for one in mine.values()]
        for name, one in mine.items():
            one.register_hook(_without_base)
            one.register_post_accumulate_grad_hook(partial(look, name))
        (mine["alone"] * given + mine["shared"].unsqueeze(0)).square().sum().backward()
        del kept
    return found["alone"] if found["alone"] < found["shared"] else 0
