"""Whether a program has cleared its gradients since results were handed back, as seen where a pass adds to them.

When a step begins, its pass has filled some gradients: the first one, or a bucket of DistributedDataParallel; and
passes without an exchange before it have filled all. So autograd says what there is before it adds to a gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ...codecs.work import together
from ..shards import is_divided, local

_See = Callable[[int, nn.Parameter], None]


class Cleared:
    """Watches the first, the middle and the last of some parameters.

    Those that ranks have parts of get their gradients past autograd: there, what a step begins with has to do.

    Args:
        parameters: of one optimizer.
        looks: returns whether there are results that nobody has used, and no step is under way.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], looks: Callable[[], bool]) -> None:
        self._parameters, self._looks = parameters, looks
        self._kept: dict[int, bool] = {}  # of those that passes have added to, by number: no pass found it cleared
        self._nodes = []  # torch forgets those that nobody has
        seen, found = weakref.WeakMethod(self._see), [p for p in parameters if p.requires_grad and not is_divided(p)]
        for number in sorted({0, len(found) // 2, len(found) - 1}) if found else ():
            parameter = found[number]
            self._nodes.append(node := get_gradient_edge(parameter).node)
            handle = node.register_prehook(_Prehook(seen, number, parameter))
            weakref.finalize(self, handle.remove).atexit = False

    @torch.no_grad()
    def _see(self, number: int, parameter: nn.Parameter) -> None:
        """Look at a gradient that autograd is about to add to."""
        if self._kept.get(number, True) and self._looks():
            self._kept[number] = _filled([parameter]) == 1

    def most_kept(self) -> bool:
        """Return, as a step begins, whether most gradients still had what was handed back when new ones came."""
        kept, self._kept = self._kept, {}
        if kept:
            return 2 * sum(kept.values()) > len(kept)
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        return 2 * _filled(trained) > len(trained)


class _Prehook:
    """What autograd calls before it adds to a gradient."""

    def __init__(self, see: Callable[[], _See | None], number: int, of: nn.Parameter) -> None:
        self._see, self._number, self._of = see, number, weakref.ref(of)

    def __call__(self, grads: tuple[Tensor, ...]) -> None:
        see, parameter = self._see(), self._of()
        if see and parameter is not None:
            see(self._number, parameter)


def _filled(parameters: Sequence[nn.Parameter]) -> int:
    """Return how many have a gradient that is not all zeros."""
    grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return sum(map(bool, together([True if grad.is_sparse else grad.any() for grad in grads])))  # one wait on a GPU
