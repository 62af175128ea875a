"""The exchanges of an update-mode optimizer: weight updates, or gradients, become their mean over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import NonFiniteError
from ...ops.checksums import hash_of
from ..reducer import Reducer

_MOMENTA = ("momentum_buffer", "exp_avg")

Parameters = list[nn.Parameter]


class Exchange:
    """Turns weight updates, or gradients, into their mean over ranks.

    The reducer is given copies of updates, so the weights are whole at any time, whatever interrupts.
    """

    def __init__(self, reducer: Reducer, parameters: Parameters, masking: bool) -> None:
        self.reducer, self.parameters = reducer, parameters
        self._masking = masking
        self.base = [torch.empty_like(parameter) for parameter in parameters]
        self._updates = [torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in parameters]
        self._dense = 0.0
        self._resting: set[int] = set()  # frozen in all local steps since the last exchange

    def leave_frozen(self) -> list[int]:
        """Let a local step skip frozen parameters, whatever gradients they have left; return which these are."""
        frozen = [index for index, parameter in enumerate(self.parameters) if not parameter.requires_grad]
        for index in frozen:
            self.parameters[index].grad = None
        return frozen

    def remember(self) -> None:
        """Note the weights that updates are counted from."""
        for base, parameter in zip(self.base, self.parameters, strict=True):
            base.copy_(parameter)

    def set_back(self) -> None:
        """Put the noted weights back."""
        for base, parameter in zip(self.base, self.parameters, strict=True):
            parameter.copy_(base)

    def compare(self, tensors: Iterable[Tensor], counters: tuple[int, ...]) -> None:
        """Let the next exchange begin with a comparison of these across ranks."""
        what = "weights, second moments or step counts of the update-mode optimizer"
        self.reducer.start.compare_first(hash_of([torch.tensor(counters), *tensors]), what)

    def count_dense(self) -> None:
        """Let the bytes of an uncompressed ring count every local step, once: it would exchange them all."""
        world = self.reducer.world
        self._dense += 8 * self.reducer.plan.count * (world - 1) / world
        self.reducer.metrics.bytes_dense = self._dense

    def resting(self) -> list[str]:
        """Return the names of what all local steps since the last exchange have left where it was."""
        return [self.reducer.plan.names()[index] for index in sorted(self._resting)]

    def resume(self, resting: Iterable[str]) -> None:
        """Restore what :meth:`resting` returned."""
        names = set(resting)
        self._resting = {index for index, name in enumerate(self.reducer.plan.names()) if name in names}

    def rest(self, frozen: Iterable[int], *, first: bool) -> None:
        """Note which parameters a local step leaves where they are.

        Args:
            first: it is the first one since the last exchange.
        """
        self._resting = set(frozen) if first else self._resting & set(frozen)

    def updates(self, round_index: int, state: dict[nn.Parameter, Any]) -> None:
        """Let the weights be the noted ones plus the mean of all ranks' updates.

        If that fails, they are the noted ones.

        Raises:
            NonFiniteError: some update was not finite on some rank; parameters of the same bucket
                are the noted ones, on every rank.
        """
        self.reducer.buckets.next_steps(round_index)
        self.reducer.freeze(self._resting)
        self._show(self.base)
        momenta = list(self._momenta(state)) if self._masking else []
        try:
            step = -1
            for index, parameter in enumerate(self.parameters):
                update = torch.sub(parameter, self.base[index], out=self._updates[index])
                step = self.reducer.offer(index, update)
            bad = [index for index in range(len(self.parameters)) if not self._add_result(index, step)]
        except BaseException:
            self.set_back()
            raise
        for momentum, copy in momenta:
            if copy is not momentum:
                momentum.copy_(copy)
        if bad:
            raise NonFiniteError(
                self._told(bad, "weights", "there the weights were reset to those of the last exchange")
            )

    def _add_result(self, index: int, step: int) -> bool:
        """Finish one parameter; return False if its update is not finite, and set it back."""
        parameter, base = self.parameters[index], self.base[index]
        if self._fetch(index, step, self._updates[index]):
            if index in self._resting:
                return True  # not even -0 becomes 0
            torch.add(base, self._updates[index], out=parameter)
            return True
        parameter.copy_(base)
        return False

    def _fetch(self, index: int, step: int, tensor: Tensor) -> bool:
        """Wait for one result, in place; return whether it is finite, as it is on all ranks or none."""
        try:
            self.reducer.result(index, step)
        except NonFiniteError:
            return False
        return not ops.count_nonfinite(tensor.view(-1))

    def gradients(self) -> bool:
        """Replace every rank's gradient by their mean, uncompressed; return whether all are finite.

        A parameter for which no rank has a gradient has none afterwards either.
        """
        self.reducer.buckets.next_steps(plain=True)
        self.reducer.freeze(frozen := self.leave_frozen())
        self._show(self.parameters)
        step, means = -1, []
        for index, parameter in enumerate(self.parameters):
            means.append(_marked(parameter))
            step = self.reducer.offer(index, means[-1])
        finite = [self._fetch(index, step, mean) for index, mean in enumerate(means)]
        for index, (parameter, mean) in enumerate(zip(self.parameters, means, strict=True)):
            if index in frozen or _nowhere(mean):
                parameter.grad = None
            elif mean is not parameter.grad:
                parameter.grad.copy_(mean)  # type: ignore[union-attr]
        return all(finite)

    def _show(self, weights: Sequence[Tensor]) -> None:
        """Let the other ranks compare weights that should be the same as theirs, if they do in this exchange."""
        if self.reducer.verification.weights:
            self.reducer.verification.weights.take(self.reducer.next_step(), weights)

    def not_finite(self) -> NonFiniteError:
        """Return the error for a mean gradient that is not finite."""
        grads = [p.grad for p in self.parameters]
        bad = [i for i, grad in enumerate(grads) if grad is not None and not grad.isfinite().all()]
        return NonFiniteError(self._told(bad, "mean gradients", "no weight was changed"))

    def _told(self, bad: list[int], what: str, state: str) -> str:
        names = [self.reducer.plan.names()[index] for index in bad]
        return (
            f"rank {self.reducer.rank}: {what} are not finite on some rank, in {len(bad)} parameter(s): "
            f"{', '.join(names[:5])}; {state}, on every rank. Lower the learning rate or clip gradients, and load the "
            "optimizer's state from a checkpoint"
        )

    def _momenta(self, state: dict[nn.Parameter, Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Let the method empty momentum where it sends; yield buffers and what stands for them."""
        for index, parameter in enumerate(self.parameters):
            kept = state.get(parameter, {})
            own = [kept[name] for name in _MOMENTA if isinstance(kept.get(name), Tensor)]
            copies = [momentum.contiguous() for momentum in own]
            self.reducer.buckets.clear_where_sent(index, copies)
            yield from zip(own, copies, strict=True)


def _marked(parameter: nn.Parameter) -> Tensor:
    """Return a gradient to be averaged, whose first element is -0 if there is none, and else not.

    A sum is -0 only where every rank has -0: so all learn of a gradient that some rank has, and nothing
    more has to be exchanged.
    """
    if parameter.grad is None:
        parameter.grad = torch.full_like(parameter, -0.0)
        return parameter.grad.contiguous()
    mean = parameter.grad.contiguous()
    mean.view(-1)[:1].add_(0.0)  # a gradient that happens to be -0 becomes +0
    return mean


def _nowhere(mean: Tensor) -> bool:
    """Return whether no rank had a gradient; looks further than the first element, where means may underflow to -0."""
    flat = mean.view(-1)
    if not flat.numel() or float(flat[0]) != 0 or not bool(flat[0].signbit()):
        return False
    return bool(((flat == 0) & flat.signbit()).all())
