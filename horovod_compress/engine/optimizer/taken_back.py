"""Tells of steps that are taken back for an optimizer and its model, as after a learning-rate finder, and not here."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from ..reducer import Reducer
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
        self._before: frozenset[float] = frozenset()
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
                found._before = _steps(optimizer)

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
        now = _steps(optimizer)
        if not self._is_loaded and (now != self._before or not now):  # else it is of this very step
            self._kind = type(optimizer).__name__


def _steps(optimizer: Any) -> frozenset[float]:
    """Return how many steps an optimizer has made with its parameters, as far as it counts them."""
    return frozenset(float(state["step"]) for state in optimizer.state.values() if "step" in state)
