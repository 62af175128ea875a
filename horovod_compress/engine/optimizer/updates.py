"""The exchanges of update mode: what a rank's local steps have made of the weights becomes the mean over ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import NonFiniteError, some_of
from ...ops.checksums import hash_of
from ..reducer import Next, Reducer
from ..shards import local
from .outer import Outer

_MOMENTA = ("momentum_buffer", "exp_avg")

Parameters = list[nn.Parameter]


@dataclass
class InFlight:
    """Updates that were taken from the weights and are not applied to them yet.

    Attributes:
        indices: of the parameters, by their numbers.
        resting: those that no local step has moved.
        step: that their results belong to; None once these are there.
        age: local steps since they were taken.
        bad: parameters whose results are not finite; known once they are there.
        weights: as they were when the updates were taken, where local steps go on.
        sent: by number and name of a momentum, 0 where an update was sent and else 1, where local steps go on.
    """

    indices: list[int]
    resting: set[int]
    step: int | None
    age: int = 0
    bad: list[int] = field(default_factory=list)
    weights: dict[int, Tensor] = field(default_factory=dict)
    sent: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class UpdateExchange:
    """Turns weight updates, or gradients, into their mean over ranks.

    The reducer is given copies of updates, so the weights are whole at any time, whatever interrupts.

    Args:
        masking: whether momentum is emptied where updates were sent.
        mixing: what part of the way weights go from this rank's own to the common ones.
        norms: where updates are to be no longer than the median of the ranks', returns the norms of all ranks.

    Attributes:
        base: the common weights, where a rank's own have left them.
        outer: the optimizer that steps on them; None to add mean updates as they are.
        kind: of the rounds that updates travel in.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: Parameters,
        masking: bool,
        mixing: float = 1.0,
        norms: Callable[[float], Sequence[float]] | None = None,
    ) -> None:
        self.parameters = parameters
        self.move(reducer)
        self._masking, self._mixing, self._norms = masking, mixing, norms
        self.base = [torch.empty_like(local(parameter), requires_grad=False) for parameter in parameters]
        self.remember(range(len(parameters)))  # an optimizer that is made of them may look
        self._updates = [torch.empty(base.shape, dtype=base.dtype, device=base.device) for base in self.base]
        self._before: dict[int, Tensor] = {}  # weights when their updates were taken, where local steps go on
        self.outer: Outer | None = None
        self.kind: Literal["method", "compressed"] = "method"
        self._dense = 0.0
        self._resting: set[int] = set()  # frozen in all local steps since the last exchange
        self._mixed: set[int] = set()  # a part of a rank's own weights stayed when they followed the common ones

    def move(self, reducer: Reducer) -> None:
        """Exchange with the ranks of a reducer; in an elastic job others take their place, with the same plan."""
        self.reducer = reducer
        self._buckets, self._start, self._verification = reducer.buckets, reducer.start, reducer.verification

    def leave_frozen(self) -> list[int]:
        """Let a local step skip frozen parameters, whatever gradients they have left; return which these are."""
        frozen = [index for index, parameter in enumerate(self.parameters) if not parameter.requires_grad]
        for index in frozen:
            self.parameters[index].grad = None
        return frozen

    def weights(self) -> list[Tensor]:
        """Return what this rank has of all parameters."""
        return [*map(local, self.parameters)]

    def _weights(self, index: int) -> Tensor:
        """Return the weights of a parameter that this rank has."""
        return local(self.parameters[index])

    @torch.no_grad()
    def remember(self, indices: Iterable[int]) -> None:
        """Note the weights that updates are counted from."""
        for index in indices:
            self.base[index].copy_(self._weights(index))

    def compare(self, tensors: Iterable[Tensor], counters: tuple[int, ...]) -> None:
        """Let the next exchange begin with a comparison of these across ranks."""
        what = "weights, second moments or step counts of the update-mode optimizer"
        self._start.compare_first(hash_of([torch.tensor(counters, device="cpu"), *tensors]), what)

    def count_dense(self) -> None:
        """Let the bytes of an uncompressed ring count every local step, once: it would exchange them all."""
        world = self.reducer.world
        self._dense += 8 * self.reducer.plan.count * (world - 1) / world
        self.reducer.metrics.expect(self._dense)

    def resting(self) -> list[str]:
        """Return the names of what all local steps since the last exchange have left where it was."""
        return [self.reducer.plan.names()[index] for index in sorted(self._resting)]

    def mixed(self) -> list[str]:
        """Return the names of those that go to the common weights in one exchange more, also while they are frozen."""
        return [self.reducer.plan.names()[index] for index in sorted(self._mixed)]

    def resume(self, resting: Iterable[str], mixed: Iterable[str]) -> None:
        """Restore what :meth:`resting` and :meth:`mixed` returned."""
        number = {name: index for index, name in enumerate(self.reducer.plan.names())}
        self._resting, self._mixed = ({number[name] for name in names if name in number} for names in (resting, mixed))

    def rest(self, frozen: Iterable[int], first: Iterable[int]) -> None:
        """Note which parameters a local step leaves where they are.

        Args:
            first: those for which it is the first one since their last exchange.
        """
        self._resting = set(frozen) & (self._resting | set(first))

    # ---- updates ----

    def take(
        self, indices: list[int], round_index: int, state: Mapping[nn.Parameter, Any], *, goes_on: bool = False
    ) -> InFlight:
        """Let the updates of some parameters be exchanged, and return what is pending then.

        Args:
            indices: rising; whole buckets.
            state: of the optimizer.
            goes_on: local steps go on meanwhile.
        """
        reducer = self.reducer
        self._buckets.choose(Next(self.kind, round_index))
        resting = self._resting - self._mixed
        reducer.freeze(resting)
        self._verification.take_weights(reducer.next_step(), self.base)
        pending = InFlight(indices, resting & set(indices), None)
        if goes_on:
            pending.weights = {index: self._noted(index) for index in indices}
        pending.sent = self._masks(indices, state, goes_on) if self._masking else {}
        try:
            if self._norms:
                self._clip(indices, self._norms)
            wanted = set(indices)
            for index in range(len(self.parameters)):
                if index not in wanted:
                    reducer.skip(index)
                    continue
                if not self._norms:
                    self._subtract(index)
                pending.step = reducer.offer(index, self._updates[index])
        except BaseException:
            self.go_back(range(len(self.base)))
            raise
        return pending

    def _noted(self, index: int) -> Tensor:
        """Return a copy of a parameter, in memory that is kept: one exchange is under way at a time."""
        if index not in self._before:
            self._before[index] = torch.empty_like(self.base[index])
        return self._before[index].copy_(self._weights(index))

    def _subtract(self, index: int) -> Tensor:
        return torch.sub(self._weights(index), self.base[index], out=self._updates[index])

    def _clip(self, indices: list[int], norms: Callable[[float], Sequence[float]]) -> None:
        """Let this rank's update be no longer than the median of the ranks'.

        One that is not finite is sent as it is, so that all ranks notice; it is no part of the median, and neither is
        one of zeros, as a gradient scaler makes it. The median is the lower one, so that it protects two ranks, too.
        """
        here = float(torch.stack([self._subtract(index).norm(dtype=torch.float64).cpu() for index in indices]).norm())
        found = norms(here)
        mine, usual = found[self.reducer.rank], [norm for norm in found if 0 < norm < float("inf")]
        if usual and (longest := median_low(usual)) < mine < float("inf"):
            for index in indices:
                self._updates[index].mul_(longest / mine)

    def result(self, index: int) -> Tensor:
        """Return the memory of a parameter's update, where its result is once :meth:`receive` has waited for it."""
        return self._updates[index]

    def receive(self, pending: InFlight) -> None:
        """Wait for the results of updates, on which applying them waits otherwise; if that fails, weights go back.

        Raises:
            ExchangeError: the exchange failed; all weights are the common ones of before.
        """
        if pending.step is None:
            return
        try:
            found = {index: self._fetch(index, pending.step, self._updates[index]) for index in pending.indices}
            self.reducer.settle(pending.step)  # buckets that were left out are awaited by nobody else
        except BaseException:
            self.go_back(range(len(self.base)))
            raise
        pending.bad = [index for index, finite in found.items() if not finite]
        pending.step = None

    def apply(
        self, pending: InFlight, state: Mapping[nn.Parameter, Any], *, outer: bool = True, keep_own: bool = False
    ) -> None:
        """Let the common weights go by the mean of all ranks' updates, or the outer optimizer's step, and ours follow.

        Args:
            state: of the optimizer.
            outer: whether the outer optimizer steps, if there is one.
            keep_own: a part of what weights differ in from the common ones may stay; else they become these.

        Raises:
            NonFiniteError: some update was not finite on some rank; parameters of the same bucket are the common
                weights of before, on every rank.
            ExchangeError: see :meth:`receive`.
        """
        self.receive(pending)
        bad, moved = set(pending.bad), [i for i in pending.indices if i not in pending.resting]  # not even -0 becomes 0
        for index in pending.bad:
            self._weights(index).copy_(self.base[index])
        moved = [index for index in moved if index not in bad]
        if not keep_own and self.outer is None:  # the common weights are noted when local steps leave them
            for index in moved:
                torch.add(self.base[index], self._updates[index], out=self._weights(index))
        else:
            self._move_base(moved, outer)
            for index in moved:
                # What is frozen since its update was taken ends at the common weights, to the bit, and rests there.
                keeps = keep_own and index not in self._resting
                self._follow(index, pending.weights.get(index) if keeps else None, self._mixing if keeps else 1.0)
        self._mixed -= set(pending.indices)
        self._mixed |= set(moved) - self._resting if keep_own else set()
        self._empty_momenta(pending, state)
        if pending.bad:
            told = "there the weights were reset to those of the last exchange"
            raise NonFiniteError(self._told(pending.bad, "weights", told))

    def _move_base(self, indices: list[int], outer: bool) -> None:
        if outer and self.outer:
            self.outer.step({index: self._updates[index] for index in indices})
            return
        for index in indices:
            self.base[index].add_(self._updates[index])

    def _follow(self, index: int, before: Tensor | None, mixing: float) -> None:
        """Let this rank's weights follow the common ones: what local steps did since the update was taken stays.

        Args:
            before: the weights when it was taken, if local steps went on; is overwritten.
        """
        weights, base = self._weights(index), self.base[index]
        if before is not None:
            weights.add_(torch.sub(base, before, out=before), alpha=mixing)
        elif mixing == 1.0:
            weights.copy_(base)
        else:
            weights.lerp_(base, mixing)

    @torch.no_grad()  # whoever saves or loads a state may wait for results, too
    def go_back(self, indices: Collection[int]) -> None:
        """Let weights be the common ones."""
        for index in indices:
            self._weights(index).copy_(self.base[index])
        self._mixed -= set(indices)

    def _fetch(self, index: int, step: int, tensor: Tensor) -> bool:
        """Wait for one result, in place; return whether it is finite, as it is on all ranks or none."""
        try:
            self.reducer.result(index, step)
        except NonFiniteError:
            return False
        return not ops.count_nonfinite(tensor.view(-1))

    # ---- gradients ----

    def gradients(self, weights: Sequence[Tensor]) -> bool:
        """Replace every rank's gradient by their mean, uncompressed; return whether all are finite.

        A parameter for which no rank has a gradient has none afterwards either.

        Args:
            weights: that all ranks have now, for a comparison; their own may differ from them.
        """
        self._buckets.choose(Next("plain"))
        self.reducer.freeze(frozen := self.leave_frozen())
        self._verification.take_weights(self.reducer.next_step(), weights)
        step, means = -1, []
        for index, parameter in enumerate(self.parameters):
            means.append(_marked(parameter))
            step = self.reducer.offer(index, means[-1])
        finite = [self._fetch(index, step, mean) for index, mean in enumerate(means)]
        for index, (parameter, mean) in enumerate(zip(self.parameters, means, strict=True)):
            if index in frozen or _nowhere(mean):
                parameter.grad = None
            elif parameter.grad is not None and mean is not (grad := local(parameter.grad)):
                grad.copy_(mean)
        return all(finite)

    def not_finite(self) -> NonFiniteError:
        """Return the error for a mean gradient that is not finite."""
        grads = [None if p.grad is None else local(p.grad) for p in self.parameters]
        bad = [i for i, grad in enumerate(grads) if grad is not None and not grad.isfinite().all()]
        return NonFiniteError(self._told(bad, "mean gradients", "no weight was changed"))

    def _told(self, bad: list[int], what: str, state: str) -> str:
        names = [self.reducer.plan.names()[index] for index in bad]
        return (
            f"rank {self.reducer.rank}: {what} are not finite on some rank, in {len(bad)} parameter(s): "
            f"{some_of(names)}; {state}, on every rank. Lower the learning rate or clip gradients, and load the "
            "optimizer's state from a checkpoint"
        )

    # ---- momentum ----

    def _masks(
        self, indices: Iterable[int], state: Mapping[nn.Parameter, Any], goes_on: bool
    ) -> dict[int, dict[str, Tensor]]:
        """Let the method empty momentum where it sends: a copy of it, or what stands for it while local steps go on."""
        masks: dict[int, dict[str, Tensor]] = {}
        for index in filter(self._buckets.sends_some, indices):
            kept = state.get(self.parameters[index], {})
            own = {name: local(kept[name]) for name in _MOMENTA if isinstance(kept.get(name), Tensor)}
            masks[index] = {n: _ones(m) if goes_on else m.contiguous() for n, m in own.items()}
            self._buckets.clear_where_sent(index, list(masks[index].values()))
        return masks

    def _empty_momenta(self, pending: InFlight, state: Mapping[nn.Parameter, Any]) -> None:
        for index, masks in pending.sent.items():
            kept = state.get(self.parameters[index], {})
            for name, mask in masks.items():
                if pending.weights and name in kept:  # else the program has dropped it meanwhile
                    local(kept[name]).masked_fill_(mask == 0, 0)
                elif not pending.weights and mask is not (momentum := local(kept[name])):
                    momentum.copy_(mask)


def _ones(tensor: Tensor) -> Tensor:
    return torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _marked(parameter: nn.Parameter) -> Tensor:
    """Return a gradient to be averaged, whose first element is -0 if there is none, and else not.

    A sum is -0 only where every rank has -0: so all learn of a gradient that some rank has, and nothing
    more has to be exchanged.
    """
    if parameter.grad is None:
        parameter.grad = torch.full_like(parameter, -0.0)
        return local(parameter.grad).contiguous()
    mean = local(parameter.grad).contiguous()
    mean.view(-1)[:1].add_(0.0)  # a gradient that happens to be -0 becomes +0
    return mean


def _nowhere(mean: Tensor) -> bool:
    """Return whether no rank had a gradient; looks further than the first element, where means may underflow to -0."""
    flat = mean.view(-1)
    if not flat.numel() or float(flat[0]) != 0 or not bool(flat[0].signbit()):
        return False
    return bool(((flat == 0) & flat.signbit()).all())
