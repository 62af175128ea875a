"""Gradients that autograd has just made, in memory that it may still need, or that it has given to two parameters.

Where a parameter enters a sum by a view of it, as ``positions.unsqueeze(0)`` does, its gradient is a view of the sum's,
which goes on to other parameters. Torch leaves it there, as nobody writes to it before the pass is over. An exchange
does, so such a gradient is copied first. Memory that a program has laid gradients into is its own matter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
        framework: it gets gradients later than this, and torch keeps references for that.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], framework: Hook = _no_hook) -> None:
        self._parameters = {id(one): one for one in parameters if not is_divided(one)}  # those have their own memory
        # By identity: what had no gradient when its last one came, and what was brought none instead of one.
        self._made: set[int] = set()
        self._none: set[int] = set()
        self._alone, self._framed = _counts(framework), framework is not _no_hook
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        for key, parameter in self._parameters.items():
            with needing_gradient(parameter):
                self._handles.append(parameter.register_hook(_noting(self, key)))

        look = uncompiled(weakly(self._separate))
        for parameter in self._parameters.values():
            with needing_gradient(parameter):
                self._handles.append(handle := parameter.register_post_accumulate_grad_hook(look))
            _let_be_first(parameter, handle.id)

    def close(self) -> None:
        """Look at gradients no more; safe to call twice."""
        _remove(self._handles)

    def note(self, key: int, grad: Tensor | None) -> Tensor | None:
        """Note whether the gradient that comes makes that of a parameter, or will be added to it, or is none.

        Returns:
            what torch is to take in its place; None to leave it.
        """
        if grad is None:
            self._none.add(key)
            return None
        self._none.discard(key)
        if self._parameters[key].grad is None:
            self._made.add(key)
        else:
            self._made.discard(key)
        return _without_base(grad, self._alone.view) if self._framed else None

    def is_none(self, parameter: nn.Parameter) -> bool:
        """Return whether a function of the program has brought no gradient where one was expected."""
        return id(parameter) in self._none

    def _separate(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd has just left in memory of others."""
        grad = parameter.grad
        if id(parameter) not in self._made or grad is None or grad.layout != torch.strided or grad._is_view():
            return
        if _is_shared(grad, self._alone):
            parameter.grad = grad.clone()


def _noting(watch: FreshGradients, key: int) -> Callable[[Tensor | None], Tensor | None]:
    """Return a hook that notes a gradient; torch.autograd.grad calls it as well, which changes none."""
    known = weakref.ref(watch)  # which has the parameters, which hold the hook

    def note(grad: Tensor | None) -> Tensor | None:
        found = known()
        return None if found is None else found.note(key, grad)

    return unserializable_hook(uncompiled(note))  # else torch would warn as it saves


def _without_base(grad: Tensor, alone: int) -> Tensor | None:
    """Return a view as a tensor that keeps no other one; None for what torch is to take as it is.

    A framework's hook keeps what came, and with a view the tensor that it is of, which would count as another's.

    Args:
        alone: references to a tensor that nothing else has: torch would copy the others itself, and is to.
    """
    free = grad._is_view() and not torch.is_grad_enabled() and _uses is not None and _uses(grad) <= alone
    return grad.detach() if free else None


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


def _let_be_first(parameter: nn.Parameter, number: int) -> None:
    """Have a hook called before those of the program, which may keep views of gradients, or change them in place."""
    hooks: Any = parameter._post_accumulate_grad_hooks
    others = [(key, hook) for key, hook in hooks.items() if key != number]
    for key, hook in others:
        del hooks[key]
        hooks[key] = hook


#: Return the references to a storage, and to a tensor; they are private in torch, and the second one is young.
_references: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
_uses: Callable[[Tensor], int] | None = getattr(Tensor, "_use_count", None)


@dataclass(frozen=True)
class Counts:
    """How many references torch counts, in a hook, to what one gradient has alone: its memory, and a view itself.

    0 where it does not count: then all memory is another's, and views are left as they are.
    """

    memory: int = 0
    view: int = 0


def _is_shared(grad: Tensor, alone: Counts) -> bool:
    """Return whether something else refers to the memory of a gradient; yes, where torch cannot tell."""
    memory = grad.untyped_storage()
    its_own = memory.resizable()  # else another library's, such as an array of NumPy
    return not its_own or not alone.memory or not _references or _references(memory._cdata) > alone.memory


@cache
def _counts(framework: Hook) -> Counts:
    """Count with small tensors, as the numbers depend on torch's version, and on the hooks behind."""
    if not (count := _references):
        return Counts()
    memory, views = {}, [0]

    def look(name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        memory[name] = count(parameter.grad.untyped_storage()._cdata)

    def look_at_view(grad: Tensor) -> None:
        views.append(_uses(grad) if _uses else 0)

    with torch.inference_mode(False), torch.enable_grad():
        alone, shared, given = (torch.ones(1, 2, device="cpu", dtype=torch.float32) for _ in range(3))
        viewed = nn.Parameter(torch.ones(2, 1, device="cpu", dtype=torch.float32))
        mine = {"alone": nn.Parameter(alone), "shared": nn.Parameter(shared[0])}
        kept = [framework(one) for one in (*mine.values(), viewed)]
        viewed.register_hook(look_at_view)
        for name, one in mine.items():
            one.register_hook(lambda grad: None)
            one.register_post_accumulate_grad_hook(partial(look, name))
        total = mine["alone"] * given + mine["shared"].unsqueeze(0) + viewed.t() * given
        total.square().sum().backward()
        del kept
    return Counts(memory["alone"], views[-1]) if memory["alone"] < memory["shared"] else Counts()
