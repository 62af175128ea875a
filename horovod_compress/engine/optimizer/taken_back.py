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
    "the state of %s was loaded between two steps, and that of the compression was not, so what it keeps%s is still of "
    "the steps that were taken back, and training may be worse. Load both: give compression.load_state_dict() what "
    "compression.state_dict() returned when you saved the optimizer's state or, if you did not save it, "
    'compression.state_dict() itself with residuals="reset"'
)


class TakenBack:
    """Warns once, on rank 0, where an optimizer goes on from another step, and the compression from this one."""

    def __init__(self, reducer: Reducer, takers: Takers) -> None:
        self._reducer, self._takers = reducer, takers
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handles: list[Any] = []
        self._is_loaded = True  # what is kept is of whatever was loaded: nothing was exchanged since
        self._before: list[str] = []
        self._kind: str | None = None  # of an optimizer whose state was loaded
        self._told = reducer.rank != 0 or reducer.world == 1

    def follow(self, optimizer: Any) -> None:
        """Hear of each state that an optimizer loads."""
        if self._told or optimizer in self._followed:
            return
        self._followed.add(optimizer)
        mine = weakref.ref(self)

        def before(optimizer: Any, _: dict[str, Any]) -> None:
            if found := mine():
                found._before = _place_of(optimizer)

        def after(optimizer: Any) -> None:
            if found := mine():
                found._note(optimizer)

        self._handles.append(optimizer.register_load_state_dict_pre_hook(before))
        self._handles.append(optimizer.register_load_state_dict_post_hook(after))

    def release(self) -> None:
        """Leave the optimizers without hooks of this."""
        for handle in self._handles:
            handle.remove()

    def loaded(self) -> None:
        """Take note that what is kept was loaded too."""
        self._is_loaded, self._kind = True, None

    def begin(self) -> None:
        """Begin a step: from now on, what is kept goes on from here."""
        if self._kind and not self._told:
            held = any(one.names() for one in self._takers.held)
            if held or keeps(self._reducer, self._reducer.next_step()):
                self._told = True
                _log.warning(_TOLD, self._kind, ", such as the second moment," if held else "")
        self._is_loaded, self._kind = False, None

    def _note(self, optimizer: Any) -> None:
        # Programs also load what there is: to set a rate, or by another call of torch's. And some optimizers, such as
        # SGD without momentum, have nothing by which to tell one step from another.
        if not self._is_loaded and self._before and _place_of(optimizer) != self._before:
            self._kind = type(optimizer).__name__


def _place_of(optimizer: Any) -> list[str]:
    """Return what tells after which step a state is: one element of each tensor, and numbers, in words."""
    groups = [group["step"] for group in optimizer.param_groups if "step" in group]
    kept = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    found = [*groups, *(value for state in kept for value in state.values())]
    numbers = (local(value).flatten()[:1].tolist() if isinstance(value, Tensor) else value for value in found)
    return [repr(number) for number in numbers if isinstance(number, (int, float, list))]
