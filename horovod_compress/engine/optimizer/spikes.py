"""Spikes: results that are far larger than usual, of which a program's clipping leaves little.

What is cut off a result is not sent again. But most of the gradient behind it waits in residuals, and would come in
later steps, as far as clipping lets it. Had the program clipped that gradient before the exchange, as training without
compression does, no more than its share would wait. So where a step of the optimizer finds such a result clipped, all
that waits is clipped as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

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

    def clip(self, names: Iterable[str]) -> None:
        """Before a step of an optimizer with the last results, let what is kept be as if gradients had been clipped.

        What waited before the spike becomes smaller, too. So it is made so much smaller only that results are as large
        as usual; then a program that clips every step loses no more.

        Args:
            names: whose results were handed back.
        """
        if excess := self._norms.take_excess():
            names = [*names]
            grads = [local(grad) for name in names if (grad := self._named[name].grad) is not None]
            values = [grad.coalesce().values() if grad.is_sparse else grad for grad in grads]
            norm = norm_of(values) * (self._scale() or 1.0) / self._reducer.result_scale
            self._scale_kept(names, max(norm / excess.norm, 1 / excess.times))

    def drop(self, names: Iterable[str]) -> None:
        """After a step that a program has skipped, and whose results it has dropped, likewise: nothing was left."""
        if excess := self._norms.take_excess():
            self._scale_kept(names, 1 / excess.times)

    def _scale_kept(self, names: Iterable[str], left: float) -> None:
        # A power of two loses no bit, and is the same where the sums of ranks differ in their last one.
        if (factor := 2.0 ** round(math.log2(left))) < 1.0:
            self._kept.scale_errors(dict.fromkeys(names, factor), but=())
