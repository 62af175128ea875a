"""Tells of steps that are taken back for an optimizer and its model, as after a learning-rate finder, and not here."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..reducer import Reducer
from ..shards import local
from .matching import keeps
from .taker import Takers

_log = logging.getLogger("horovod_compress")

_TOLD = (
    "the state of %s was loaded between two steps, and that of the compression was not. If the program took steps "
    "back, as after a learning-rate finder, what the compression keeps is still of these, and training may be worse: "
    "load both. Give compression.load_state_dict() what compression.state_dict() returned when you saved the "
    'state of the optimizer or, if you did not save it, compression.state_dict() itself with residuals="reset". If '
    "only the optimizer was begun anew, nothing is wrong"
)


class TakenBack:
    """Warns once, on rank 0, where an optimizer goes on from another step, and the compression from this one."""

    def __init__(self, reducer: Reducer, takers: Takers) -> None:
        self._reducer, self._takers = reducer, takers
        self._handles: dict[Any, Any] = {}  # of hooks, by their optimizers
        self._is_loaded = True  # what is kept is of whatever was loaded: nothing was exchanged since
        self._before: dict[Any, list[str]] = {}  # where optimizers were that have loaded something since a step
        self._differs: dict[Any, bool] = {}  # whether what they have loaded last is of another place
        self._told = reducer.rank != 0 or reducer.world == 1

    def follow(self, optimizer: Any) -> None:
        """Hear of each state that an optimizer is about to load."""
        if self._told or optimizer in self._handles:
            return
        mine = weakref.ref(self)

        def before(optimizer: Any, _: dict[str, Any]) -> None:
            if (found := mine()) and not found._is_loaded and optimizer not in found._before:
                found._before[optimizer] = _place_of(optimizer)

        def after(optimizer: Any) -> None:
            if (found := mine()) and (was := found._before.get(optimizer)):
                found._differs[optimizer] = _place_of(optimizer) not in ([], was)

        handles = (
            optimizer.register_load_state_dict_pre_hook(before),
            optimizer.register_load_state_dict_post_hook(after),
        )
        self._handles[optimizer] = handles

    def release(self) -> None:
        """Leave the optimizers without hooks of this."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()

    def loaded(self) -> None:
        """Take note that what is kept was loaded too."""
        self._is_loaded = True
        self._before.clear()
        self._differs.clear()

    def begin(self) -> None:
        """Begin a step: from now on, what is kept goes on from here."""
        if self._differs and not self._told:
            self._look()
        self._is_loaded = False
        self._before.clear()
        self._differs.clear()

    def _look(self) -> None:
        # Programs also load what there is: to set a rate, or by another call of torch's. And some optimizers, such as
        # SGD without momentum, have nothing by which to tell one step from another.
        others = [type(one).__name__ for one, differs in self._differs.items() if differs]
        held = any(one.names() for one in self._takers.held)
        if others and (held or keeps(self._reducer, self._reducer.next_step())):
            self._told = True
            _log.warning(_TOLD, " and ".join(others))


def _place_of(optimizer: Any) -> list[str]:
    """Return what tells after which step a state is: one element of each tensor, and numbers, in words.

    In no order: loading may change that. Empty where that cannot be said, as of tensors of kinds of their own.
    """
    try:
        groups = [group["step"] for group in optimizer.param_groups if "step" in group]
        kept = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
        found = [*groups, *(value for state in kept for value in state.values())]
        numbers = (local(value).flatten()[:1].tolist() if isinstance(value, Tensor) else value for value in found)
        return sorted(repr(number) for number in numbers if isinstance(number, (int, float, list)))
    except Exception:  # noqa: BLE001  loading goes on, whatever an optimizer keeps
        return []
