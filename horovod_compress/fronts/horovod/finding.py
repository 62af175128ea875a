"""Which parameter a gradient is of, which Horovod does not say."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

NO_ADASUM = "op=hvd.Adasum is not supported: it combines parameter updates, not gradients; use op=hvd.Average"


class Finder:
    """Finds parameters by the identity of their gradients.

    Args:
        parameters: in the order of the plan.
        rank: for people.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], rank: int) -> None:
        self._parameters, self._rank = parameters, rank
        self._order = list(range(len(parameters)))
        #: How many gradients of a step have come.
        self.calls = 0

    def look(self, tensor: Tensor, *, first: bool) -> int | None:
        """Return the index of the parameter whose gradient this is, None where it is of none.

        Gradients arrive in much the same order in every step, so the last order is tried first.

        Args:
            first: of a step.
        """
        if first:
            self.calls = 0
        place = self.calls % max(1, len(self._order))
        self.calls += 1
        if self._order and self._parameters[self._order[place]].grad is tensor:
            return self._order[place]
        for index, parameter in enumerate(self._parameters):
            if parameter.grad is tensor:
                at = self._order.index(index)
                self._order[place], self._order[at] = index, self._order[place]
                return index
        return None

    def why_unknown(self, tensor: Tensor) -> str:
        if isinstance(tensor, nn.Parameter):
            return NO_ADASUM
        return (
            f"rank {self._rank}: compress() got a tensor of shape {tuple(tensor.shape)} that is not "
            f"the gradient of any of the {len(self._parameters)} parameters in named_parameters; give "
            f"the compression all parameters of the optimizer, created while they need a gradient, and use it with "
            f"that optimizer only"
        )
