"""What an update-mode optimizer does in each step, and its exchanges with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ... import ops
from ...errors import NonFiniteError, StateError
from ...ops.checksums import hash_of
from ..agreement import differences
from ..reducer import Next, Reducer
from ..saved import checksums
from .family import options_of
from .update_moment import SharedSecondMoment, check_form

_MOMENTA = ("momentum_buffer", "exp_avg")

Parameters = list[nn.Parameter]


class UpdateExchange:
    """Turns weight updates, or gradients, into their mean over ranks.

    The reducer is given copies of updates, so the weights are whole at any time, whatever interrupts.
    """

    def __init__(self, reducer: Reducer, parameters: Parameters, masking: bool) -> None:
        self.reducer, self.parameters = reducer, parameters
        self._buckets, self._start, self._verification = reducer.buckets, reducer.start, reducer.verification
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

    def compare(self, tensors: Iterable[Tensor], counters: tuple[int, ...]) -> None:
        """Let the next exchange begin with a comparison of these across ranks."""
        what = "weights, second moments or step counts of the update-mode optimizer"
        self._start.compare_first(hash_of([torch.tensor(counters), *tensors]), what)

    def count_dense(self) -> None:
        """Let the bytes of an uncompressed ring count every local step, once: it would exchange them all."""
        world = self.reducer.world
        self._dense += 8 * self.reducer.plan.count * (world - 1) / world
        self.reducer.metrics.expect(self._dense)

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
        self._buckets.choose(Next(index=round_index))
        self.reducer.freeze(self._resting)
        self._verification.take_weights(self.reducer.next_step(), self.base)
        momenta = list(self._momenta(state)) if self._masking else []
        try:
            step, bad = -1, []
            for index, parameter in enumerate(self.parameters):
                update = torch.sub(parameter, self.base[index], out=self._updates[index])
                step = self.reducer.offer(index, update)
            for index, (parameter, base) in enumerate(zip(self.parameters, self.base, strict=True)):
                if not self._fetch(index, step, self._updates[index]):
                    parameter.copy_(base)
                    bad.append(index)
                elif index not in self._resting:  # there not even -0 becomes 0
                    torch.add(base, self._updates[index], out=parameter)
        except BaseException:
            for base, parameter in zip(self.base, self.parameters, strict=True):
                parameter.copy_(base)
            raise
        for momentum, copy in momenta:
            if copy is not momentum:
                momentum.copy_(copy)
        if bad:
            raise NonFiniteError(
                self._told(bad, "weights", "there the weights were reset to those of the last exchange")
            )

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
        self._buckets.choose(Next("plain"))
        self.reducer.freeze(frozen := self.leave_frozen())
        self._verification.take_weights(self.reducer.next_step(), self.parameters)
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
            self._buckets.clear_where_sent(index, copies)
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


# ---- when -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """The options of update mode; equal on every rank.

    Attributes:
        delay: local steps between exchanges.
        shared: whether Adam's second moment is shared.
        warmup: steps that begin the training with uncompressed gradients, if it is.
        rebuild_every: exchanges from one rebuilding of the second moment to the next.
        masking: whether momentum is emptied where updates were sent.
    """

    delay: int
    shared: bool
    warmup: int
    rebuild_every: int
    masking: bool


class Schedule:
    """What each step of an update-mode optimizer does.

    Args:
        moment: Adam's second moment, if the ranks share it.
    """

    def __init__(
        self, optimizer: Any, exchange: UpdateExchange, settings: Settings, moment: SharedSecondMoment | None
    ) -> None:
        self._optimizer, self._exchange, self._settings, self._moment = optimizer, exchange, settings, moment
        self.steps = 0  # all local steps
        self.since = 0  # local steps since the last exchange
        self.exchanges = 0
        self.due = False  # whether the second moment is to be rebuilt
        self._compared = False

    def step(self, local: Callable[[], None], skip: bool, scaled: bool) -> None:
        """Do one local step, and the exchange if it is due.

        Args:
            skip: a gradient scaler found an overflow on this rank: change nothing, but stay in step.
            scaled: there is a gradient scaler, which expects no error for an overflow.
        """
        try:
            if self._exchange.reducer.world == 1:
                if not skip:
                    local()
            elif self.steps < self._settings.warmup:
                self._compare(self._exchange.parameters)
                self._show(warming=True)
                if self._exchange.gradients():
                    local()
                elif not scaled:
                    raise self._exchange.not_finite()
            else:
                self._local_step((lambda: None) if skip else local)
        except NonFiniteError:
            self._count()  # the step was made, on all ranks
            raise
        self._count()

    def _count(self) -> None:
        self.steps += 1
        self._exchange.count_dense()

    def _show(self, *, warming: bool, rebuild: bool = False) -> None:
        """Show the other ranks what weights depend on: in the warm-up, on what the optimizer makes of a gradient.

        Args:
            rebuild: the second moment may be rebuilt after the exchange.
        """
        rebuilds = rebuild and (self.due or self._is_due(self.exchanges + 1))
        shown = {name: value if warming else None for name, value in options_of(self._optimizer).items()}
        counters = f"step {self.steps}, exchange {self.exchanges}, {'' if rebuilds else 'not '}rebuilding"
        moment = self._moment.shown() if self._moment else None
        shown |= {differences.COUNTERS: counters, differences.SECOND_MOMENT: moment}
        reducer = self._exchange.reducer
        reducer.kept.show(reducer.next_step(), shown)

    def _local_step(self, local: Callable[[], None]) -> None:
        if self._moment:
            self._moment.begin(self.steps)
        if self.since == 0:
            self._exchange.remember()
        self._exchange.rest(self._exchange.leave_frozen(), first=self.since == 0)
        local()
        self.since += 1
        if self.since == self._settings.delay:
            self.exchange()

    def prepare(self) -> None:
        """Before the optimizer's own step, let it divide by the second moment that is held, if one is."""
        if self._moment and self._moment.holds:
            self._moment.prepare()

    def exchange(self, *, rebuild: bool = True) -> None:
        """Exchange the updates of the local steps since the last exchange, if there were any.

        Args:
            rebuild: the gradients are those of the last local step, so that the second moment may be
                rebuilt from them; else that waits for the next exchange.
        """
        if self.since == 0:
            return
        self._compare(self._exchange.base)
        self._show(warming=False, rebuild=rebuild)
        self.since = 0
        # Rounds are counted from 1, so a method's full-precision round comes after compressed ones.
        self.exchanges += 1
        self.due |= self._is_due(self.exchanges)  # also where the exchange is not finite
        self._exchange.updates(self.exchanges, self._optimizer.state)
        if self._moment and self.due and rebuild:
            self.due = False
            if self._exchange.gradients():
                self._moment.rebuild(self.steps + 1)  # with the one that is being done

    def _is_due(self, exchange: int) -> bool:
        return exchange % self._settings.rebuild_every == 0

    def _compare(self, weights: Sequence[Tensor]) -> None:
        """See that all ranks are at the same point, once after the start and after each load."""
        if not self._compared:
            counters = (self.steps, self.since, self.exchanges, int(self.due))
            self._exchange.compare([*weights, *(self._moment.compared() if self._moment else ())], counters)
            self._compared = True

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the common weights if local steps have left them, and what is held."""
        base = [base.clone() for base in self._exchange.base] if self.since else []
        counters = {"steps": self.steps, "since": self.since, "exchanges": self.exchanges, "due": self.due}
        held = {"second_moment": self._moment.state_dict()} if self._moment else {}
        resting = {"resting": self._exchange.resting()} if self.since else {}
        return checksums.sealed(counters | {"base": base} | held | resting)

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state that does not fit.

        Raises:
            ConfigError: says what was expected.
        """
        check_form(state)
        shapes = [list(base.shape) for base in state["base"]]
        expected = [list(base.shape) for base in self._exchange.base] if state["since"] else []
        if state["since"] >= self._settings.delay or shapes != expected:
            raise StateError(
                f"the saved optimizer was {state['since']} local steps past an exchange, with the common weights of "
                f"{len(shapes)} parameters; expected fewer steps than communication_delay={self._settings.delay} and "
                f"{len(expected)} parameters of the same shapes: resume with the same options and model"
            )
        if self._moment and "second_moment" in state:
            self._moment.check(state["second_moment"], warming=state["steps"] < self._settings.warmup)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned and :meth:`check` accepted."""
        self.steps, self.since, self.exchanges = state["steps"], state["since"], state["exchanges"]
        self.due = state.get("due", False)  # earlier versions did not have to wait
        self._compared = False
        if self._moment and "second_moment" in state:
            self._moment.load_state_dict(state["second_moment"])
        elif self._moment:
            self._moment.load_earlier(self._rebuilt())
        self._exchange.resume(state.get("resting", ()))  # earlier versions exchanged frozen parameters
        # None are saved right after an exchange: they are the weights.
        for base, saved in zip(self._exchange.base, state["base"], strict=False):
            base.copy_(saved)

    def _rebuilt(self) -> int:
        """Return after how many local steps the second moment moved last, which earlier versions did not save."""
        warmup, every = self._settings.warmup, self._settings.rebuild_every
        exchanges = self.exchanges % every + every * self.due
        return max(warmup, self.steps - self.since - exchanges * self._settings.delay) if self.steps >= warmup else -1
