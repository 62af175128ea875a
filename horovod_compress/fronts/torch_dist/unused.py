"""Parameters that no rank uses in a step: what waits for them stays, as DistributedDataParallel leaves their gradients.

With ``find_unused_parameters=True``, a hook gets zeros for a parameter that this rank has not used, and whether some
other rank has used it is known at the end of the backward pass only, from an all-reduce of DistributedDataParallel's.
If none has, it drops the result. So what is kept for the parameters that this rank has not used is set aside before
their zeros are offered, and put back if the result was dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...engine.kept import Kept

#: What was kept for a tensor, with its number in the plan, and its gradient in DistributedDataParallel's bucket.
Aside = tuple[int, dict[str, Tensor], Tensor, Tensor]


def looks_for_unused(model: DistributedDataParallel) -> bool:
    """Return whether a step may leave parameters out; a static graph leaves out the same ones in every step."""
    return bool(model.find_unused_parameters) and not getattr(model, "static_graph", False)


class Unused:
    """Follows which parameters of a model the ranks use.

    Args:
        model: it looks for unused parameters.
        kept: what the reducer keeps from step to step.
    """

    def __init__(self, model: DistributedDataParallel, kept: Kept) -> None:
        self._model, self._kept = weakref.ref(model), kept  # the model holds the hook, and so this
        self._used: set[int] = set()  # by identity, as all here
        self._aside: dict[int, Aside] = {}
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self._note, id(parameter)))

    def _note(self, parameter: int, grad: Tensor | None) -> None:
        if grad is not None:
            self._used.add(parameter)

    def begin(self) -> None:
        """Begin a backward pass: an error may have ended the one before."""
        self._aside.clear()

    def set_aside(self, parameters: Sequence[Tensor], numbers: Sequence[int], grads: Sequence[Tensor]) -> None:
        """Keep what belongs to the unused ones of a bucket, before their gradients are offered."""
        for parameter, number, grad in zip(parameters, numbers, grads, strict=True):
            if id(parameter) not in self._used:
                self._aside[id(parameter)] = (number, self._kept.set_aside(number), grad, grad.clone())

    def settle(self, brought: Collection[int]) -> None:
        """At the end of a backward pass, after DistributedDataParallel's own: put back what no rank has used.

        Args:
            brought: all parameters that it has handed gradients over for.
        """
        aside, self._aside = self._aside, {}
        self._used.clear()
        model = self._model()
        if not aside or model is None:
            return
        order = [id(parameter) for parameter in model.module.parameters() if id(parameter) in brought]
        with torch.no_grad():
            for parameter, ranks in zip(order, _ranks_that_used(model), strict=True):
                if not ranks and parameter in aside:
                    number, saved, grad, given = aside[parameter]
                    self._kept.put_back(number, saved)
                    grad.copy_(given)  # a gradient of before may lie there


def _ranks_that_used(model: DistributedDataParallel) -> list[int]:
    """Return how many ranks have used each parameter; DistributedDataParallel's ``join()`` asks the same way."""
    reducer: Any = model.reducer
    return reducer._get_local_used_map().tolist()
