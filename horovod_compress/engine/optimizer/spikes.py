"""Spikes: results that are far larger than usual, of which a program's clipping leaves little.

What is cut off a result is not sent again. But most of the gradient behind it waits in residuals, and would come in
later steps, as far as clipping lets it. Had the program clipped that gradient before the exchange, as training without
compression does, no more than its share would wait. So where a step of the optimizer finds such a result clipped, or a
program skips that step, all that waits is clipped as much, and the momentum of methods, which would bring it, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import nn

from ..kept import norm_of
from ..reducer import Reducer
from ..shards import local


class Spikes:
    """Clips what is kept as the program has clipped results.

    Args:
        named: the parameters that are exchanged, of any optimizer, by name as the reducer has them.
        scale: returns the scale of the gradient scaler that is followed, 0 or 1 for none.
    """

    def __init__(self, reducer: Reducer, named: Mapping[str, nn.Parameter], scale: Callable[[], float]) -> None:
        self._reducer, self._kept, self._norms = reducer, reducer.kept, reducer.norms
        self._named, self._scale = named, scale

    def look(self, mine: frozenset[str]) -> None:
        """Before a step of an optimizer with the last results, see what is left of them.

        Of several optimizers, each may have its gradients clipped right before its own step; the last one clips.

        Args:
            mine: the parameters of the optimizer.
        """
        if not (excess := self._norms.excess):
            return
        parameters = [self._named[name] for name in sorted(excess.unused & mine)]
        grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        norm = norm_of(grad.coalesce().values() if grad.is_sparse else grad for grad in grads)
        excess.used = math.hypot(excess.used, norm * (self._scale() or 1.0) / self._reducer.result_scale)
        excess.unused -= mine
        if not excess.unused:
            self.clip()

    def drop(self, mine: frozenset[str], coded: frozenset[str]) -> None:
        """After a step whose results an optimizer has dropped, clip what waits, unless others' results may yet be used.

        Args:
            mine: the parameters of the optimizer.
            coded: those of which something may wait: not of results that were exact.
        """
        if (excess := self._norms.excess) and (mine & coded or not excess.unused & coded):
            self.clip()

    def clip(self) -> None:
        """Once nobody is to use the last results any more, let what is kept be as if gradients had been clipped.

        What waited before the spike becomes smaller, too. So it is made so much smaller only that results are as large
        as usual; then a program that clips every step loses no more.
        """
        if not (excess := self._norms.take_excess()):
            return
        left = max(excess.used / excess.norm, 1 / excess.times)
        # A power of two loses no bit, and hardly depends on the last one of norms, in which unlike processors may
        # differ. What is not finite is not clipped.
        if left < 1.0 and (factor := 2.0 ** round(math.log2(left))) < 1.0:
            self._kept.scale(factor)
