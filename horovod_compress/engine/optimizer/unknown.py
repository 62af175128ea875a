"""Tells of optimizers that make steps with the results of a compression, and were not given to it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch import nn

from ...errors import some_of
from ..reducer import Reducer
from .matching import OFTEN, keeps
from .step_hooks import builds_state
from .taker import Taker, Takers, kinds_of

_log = logging.getLogger("horovod_compress")

_BESIDE = (
    "%s makes steps with results of this compression, which knows another optimizer only: nothing sees to the momentum "
    "and second moment of %s, nor to the norms that clipping needs, and training may be worse. Give the compression "
    "all optimizers in one call, before the first backward pass: attach(first, second) or, without Horovod, "
    "register(model, [first, second])"
)

_INSTEAD = (
    "%s makes steps with results of this compression, which knows another %s: that has used none of the last %d "
    "exchanges, and until it does, gradients are sent uncompressed. Give the optimizer that makes the steps to "
    "attach() or register(); for another phase of training, close() the compression, and create another one for the "
    "new optimizer"
)


class UnknownOptimizers:
    """Looks at each optimizer of the process that is about to make a step, and tells once of either kind, on rank 0.

    Args:
        named: the parameters that are exchanged, by name.
        takers: the optimizers that are known.
    """

    def __init__(self, reducer: Reducer, named: Sequence[tuple[str, nn.Parameter]], takers: Takers) -> None:
        self._reducer, self._named, self._takers = reducer, named, takers
        self._exchanged = frozenset(id(parameter) for _, parameter in named)
        self._told = set[str]()

    def look(self, optimizer: Any) -> None:
        """Look at one, which may also be known, or have nothing to do with the compression."""
        known = self._takers.optimizers
        if self._reducer.rank or not known or any(optimizer is one for one in known):
            return
        its = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} & self._exchanged
        if not its or builds_state():
            return
        for taker in self._takers:
            mine = {id(parameter) for group in taker.optimizer.param_groups for parameter in group["params"]}
            if not its.isdisjoint(mine):
                self._instead(optimizer, taker)
            its -= mine
        if its:
            self._beside(optimizer, its)

    def _instead(self, optimizer: Any, taker: Taker) -> None:
        kind, held = type(optimizer).__name__, taker.held
        if taker.matching:
            taker.matching.note_step_of(kind)
        if not held or not held.exact or held.rounds.every == 1 or not self._reducer.idle():
            return
        if (unused := held.unused(self._reducer.next_step())) >= OFTEN:
            self._tell(_INSTEAD, kind, kinds_of([taker.optimizer]), unused)

    def _beside(self, optimizer: Any, its: set[int]) -> None:
        """Look at one that has parameters of its own, if these have results, and what becomes of them matters."""
        reducer = self._reducer
        if _BESIDE in self._told or reducer.world == 1 or not (reducer.next_step() and reducer.idle()):
            return
        if self._takers.held or keeps(reducer, reducer.next_step()):
            each = ((name, p.grad) for name, p in self._named if id(p) in its)
            if names := [name for name, grad in each if grad is not None and not grad.is_sparse]:
                self._tell(_BESIDE, type(optimizer).__name__, some_of(names))

    def _tell(self, text: str, *given: object) -> None:
        if text not in self._told:
            _log.warning(text, *given)
        self._told.add(text)
