"""When gradients would be there without any exchange: a step's compute, spread over the layers.

    seconds of a layer = seconds of the step * its multiply-adds / those of the model

A third of it is forward, two thirds are backward, as a backward pass has two products for each one of the
forward pass. The gradients of a layer are there together, when its part of the backward pass is done.
"""

from __future__ import annotations

from collections.abc import Callable

from ..schedule.costs import Arrivals
from .shapes import Table

FORWARD_SHARE = 1 / 3


def arrivals(table: Table, seconds: float, offer: Callable[[int], float] = lambda elements: 0.0) -> Arrivals:
    """Return when each gradient is there after the beginning of a step, in backward order.

    Args:
        seconds: of a step's compute, forward and backward.
        offer: seconds to submit a gradient of that many elements, one after the other, on a thread that the backward
            pass does not wait for; a gradient is there once it is submitted.
    """
    total = sum(tensor.macs for tensor in table.tensors) or 1
    counts, times = [], []
    done, taken = FORWARD_SHARE * seconds, 0.0
    for layer in reversed(table.layers()):
        done += (1 - FORWARD_SHARE) * seconds * layer.macs / total
        for tensor in reversed(layer.tensors):
            taken = max(done, taken) + offer(tensor.count)
            counts.append(tensor.count)
            times.append(taken)
    return Arrivals(tuple(counts), tuple(times))
