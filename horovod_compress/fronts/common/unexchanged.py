"""Parameters that are trained although their gradients are not exchanged, as they were frozen when that was planned.

The framework alone trains them in the same way, on each rank's own gradients, without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from torch import nn

#: Name at most so many.
_NAMED = 5

_log = logging.getLogger("horovod_compress")


class Unexchanged:
    """Warns once, in the first step in which such a parameter has a gradient.

    Args:
        others: returns the parameters that are not exchanged, by name.
        planned: what was created while they were frozen.
        again: what to create again so that they are exchanged.
    """

    def __init__(self, others: Callable[[], Iterable[tuple[str, nn.Parameter]]], planned: str, again: str) -> None:
        self._others, self._words = others, (planned, again)
        self._told = False

    def look(self) -> None:
        """Look at the gradients of a step; whenever they are all there."""
        if self._told:
            return
        found = [name for name, parameter in self._others() if parameter.grad is not None and parameter.requires_grad]
        if not found:
            return
        self._told = True
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        _log.warning(
            "%s%s: has a gradient that is never reduced, because it was frozen or missing when %s were created; each "
            "rank trains it on its own data, so it will differ between ranks, as without compression. Set "
            "requires_grad before you create them, and freeze it later; or, to train it from here on, create %s again",
            *(", ".join(found[:_NAMED]), more, *self._words),
        )
