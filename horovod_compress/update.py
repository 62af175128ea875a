"""Update mode: local optimizer steps, then the ranks' weight updates are exchanged instead of gradients.

    base = weights                                  at the first of n local steps
    weights = local optimizer step                  n times, on this rank's own gradients
    weights = base + mean over ranks of C(weights - base)

It is Sparse Binary Compression's and Marsit's own formulation: what the optimizer makes of a gradient
(momentum, weight decay, learning rate) is compressed, not what it is going to be made of. ``n``, the
communication delay, divides the bytes once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .adam import FAMILY, SharedSecondMoment
from .errors import ConfigError, HorovodCompressError, NonFiniteError
from .reducer import Reducer

_STATE_KEY = "horovod_compress"
_SHARED_BY_DEFAULT = ("marsit",)
_MOMENTA = ("momentum_buffer", "exp_avg")


def distributed_update_optimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    compression: Any,
    communication_delay: int | None = None,
    *,
    second_moment: str = "auto",
    warmup_steps: int = 30,
    rebuild_every: int | None = None,
    momentum_masking: bool = True,
) -> torch.optim.Optimizer:
    """Return the optimizer, doing local steps and exchanging weight updates.

    It is used as before: the same class, parameter groups and state. Weight decay, gradient clipping
    and momentum act locally, before the exchange. Learning-rate schedules count local steps; make
    them with the returned optimizer. Buffers, such as BatchNorm's, stay each rank's own, as under
    Horovod. With one rank it is the optimizer as it was.

    Args:
        optimizer: a plain optimizer of ``torch.optim``, not one of Horovod's.
        named_parameters: the parameters of the optimizer, as the compression was given.
        compression: used by nothing else.
        communication_delay: local steps between exchanges; by default what the compression's preset
            says, else 1.
        second_moment: of Adam and AdamW: "shared" builds it from the mean gradient over ranks, in
            full-precision rounds only; "local" leaves it to each rank; "auto" shares it with marsit.
        warmup_steps: with a shared second moment, so many steps begin the training with uncompressed
            gradients.
        rebuild_every: with a shared second moment, the number of exchanges from one full-precision
            round to the next; by default that of the method, else 50.
        momentum_masking: empty momentum where this rank's update was sent, with methods that choose.

    Raises:
        ConfigError: these do not fit together; it says what would.
    """
    if isinstance(optimizer, _UpdateMode) or hasattr(optimizer, "_allreduce_grad_async"):
        raise ConfigError("give DistributedUpdateOptimizer the plain optimizer, not a distributed one")
    delay = compression.communication_delay() if communication_delay is None else communication_delay
    _at_least("communication_delay", delay, 1)
    _at_least("warmup_steps", warmup_steps, 0)
    if not compression.included():
        return optimizer  # a rank outside the process set trains by itself, as under Horovod
    parameters = _in_plan_order(optimizer, named_parameters, compression)
    shared = _shares(second_moment, optimizer, compression.method)
    every = rebuild_every if rebuild_every is not None else compression.full_precision_every() or 50
    _at_least("rebuild_every", every, 1)
    kind = type(f"Update{type(optimizer).__name__}", (_UpdateMode, type(optimizer)), {})
    made: Any = kind.__new__(kind)
    made.__dict__.update({name: value for name, value in optimizer.__dict__.items() if name != "step"})
    adam = SharedSecondMoment(made) if shared else None
    exchange = _Exchange(compression.begin_updates(), compression.close, parameters, momentum_masking)
    made._updates = _Schedule(made, exchange, delay, warmup_steps if shared else 0, every, adam)
    return made


def _shares(second_moment: str, optimizer: torch.optim.Optimizer, method: str) -> bool:
    if second_moment not in ("auto", "shared", "local"):
        raise ConfigError(f'second_moment should be "auto", "shared" or "local", got {second_moment!r}')
    adam = type(optimizer) in FAMILY
    if second_moment == "shared" and not adam:
        raise ConfigError(f'second_moment="shared" is for Adam and AdamW, got {type(optimizer).__name__}')
    return adam and (second_moment == "shared" or second_moment == "auto" and method in _SHARED_BY_DEFAULT)


def _at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} should be a whole number, at least {least}, got {value!r}")


def _in_plan_order(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, nn.Parameter]], compression: Any
) -> list[nn.Parameter]:
    """Return the parameters in the order of the plan.

    Raises:
        ConfigError: optimizer, named_parameters and compression do not have the same ones.
    """
    named = {name: parameter for name, parameter in named_parameters if parameter.requires_grad}
    parameters = [named.get(name) for name in compression.plan.names()]
    if any(mine is not theirs for mine, theirs in zip(parameters, compression.parameters())):
        raise ConfigError("named_parameters should be those that the compression was made with")
    known = {id(parameter) for parameter in parameters}
    of_optimizer = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if known != {id(parameter) for parameter in of_optimizer}:
        raise ConfigError(
            f"the optimizer should have the {len(known)} parameters of the compression, it has {len(of_optimizer)}, "
            f"not all the same; make both with model.named_parameters()"
        )
    return [parameter for parameter in parameters if parameter is not None]


class _Exchange:
    """Turns weights, or gradients, into their mean over ranks, in place."""

    def __init__(
        self, reducer: Reducer, close: Callable[[], None], parameters: list[nn.Parameter], masking: bool
    ) -> None:
        self.reducer, self.parameters = reducer, parameters
        self._close, self._masking = close, masking
        self.base = [torch.empty_like(parameter) for parameter in parameters]
        self._dense = 0.0

    def remember(self) -> None:
        """Note the weights that updates are counted from."""
        for base, parameter in zip(self.base, self.parameters):
            base.copy_(parameter)

    def count_dense(self) -> None:
        """Let the bytes of an uncompressed ring count every local step, once: it would exchange them all."""
        world = self.reducer.world
        self._dense += 8 * self.reducer.plan.count * (world - 1) / world
        self.reducer.metrics.bytes_dense = self._dense

    def updates(self, turn: int, state: dict[nn.Parameter, Any]) -> None:
        """Replace every rank's update by their mean.

        If that fails, the weights are those before the local steps again, which all ranks share.

        Raises:
            NonFiniteError: some weights were not finite on some rank; those of the same bucket were
                set back on all ranks.
        """
        self.reducer.next_steps(turn)
        if self._masking:
            self._mask(state)
        weights = [parameter.data for parameter in self.parameters]
        try:
            step = -1
            for index, (weight, base) in enumerate(zip(weights, self.base)):
                step = self.reducer.offer(index, weight.sub_(base))
            bad = [index for index in range(len(weights)) if not self._add_result(index, step)]
        except HorovodCompressError:
            self._close()  # the decoder may be writing
            for weight, base in zip(weights, self.base):
                weight.copy_(base)
            raise
        if bad:
            names = self.reducer.plan.names()
            raise NonFiniteError(
                f"rank {self.reducer.rank}: after local steps the weights are not finite on some rank, in the bucket(s) "
                f"of {', '.join(names[index] for index in bad[:5])}; these were set back to the last common weights. "
                f"Lower the learning rate, or clip, and restart the optimizer's state from a checkpoint"
            )

    def _add_result(self, index: int, step: int) -> bool:
        """Finish one parameter; return False if its bucket was not finite, and set it back."""
        weight, base = self.parameters[index].data, self.base[index]
        try:
            self.reducer.result(index, step)
        except NonFiniteError:
            weight.copy_(base)
            return False
        if weight.numel() and bool(weight.view(-1)[0].isnan()):  # then all of it is
            weight.copy_(base)
            return False
        weight.add_(base)
        return True

    def gradients(self) -> None:
        """Replace every rank's gradient by their mean, uncompressed."""
        self.reducer.next_steps(plain=True)
        step = -1
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            step = self.reducer.offer(index, parameter.grad)
        for index in range(len(self.parameters)):
            self.reducer.result(index, step)

    def _mask(self, state: dict[nn.Parameter, Any]) -> None:
        for index, parameter in enumerate(self.parameters):
            kept = state.get(parameter, {})
            momenta = [kept[name] for name in _MOMENTA if isinstance(kept.get(name), Tensor)]
            self.reducer.clear_where_sent(index, [m for m in momenta if m.is_contiguous()])


class _Schedule:
    """What each step of an update-mode optimizer does.

    Args:
        warmup: steps that begin the training, with the mean of uncompressed gradients.
        every: exchanges from one full-precision round to the next, with a shared second moment.
        adam: of the shared second moment, or None.
    """

    def __init__(
        self,
        optimizer: Any,
        exchange: _Exchange,
        delay: int,
        warmup: int,
        every: int,
        adam: SharedSecondMoment | None,
    ) -> None:
        self._optimizer, self._exchange = optimizer, exchange
        self._delay, self._warmup, self._every, self._adam = delay, warmup, every, adam
        self.steps = 0  # all local steps
        self.since = 0  # local steps since the last exchange
        self.exchanges = 0

    def step(self, local: Callable[[], None]) -> None:
        """Do one local step, and the exchange if it is due."""
        if self._exchange.reducer.world == 1:
            local()
        elif self.steps < self._warmup:
            self._exchange.gradients()
            local()
            if self._adam:
                self._adam.take_over()
        else:
            self._local_step(local)
        self.steps += 1
        self._exchange.count_dense()

    def _local_step(self, local: Callable[[], None]) -> None:
        if self.since == 0:
            self._exchange.remember()
        if self._adam:
            self._adam.step()
        else:
            local()
        self.since += 1
        if self.since == self._delay:
            self.since = 0
            self._exchange_updates()

    def _exchange_updates(self) -> None:
        # Rounds are counted from the first compressed one; a method's full-precision round comes last.
        number = self.exchanges + 1
        self._exchange.updates(number, self._optimizer.state)
        if self._adam and number % self._every == 0:
            self._exchange.gradients()
            means = [(p, p.grad) for p in self._exchange.parameters if p.grad is not None]
            self._adam.rebuild(means, self._every * self._delay)
        self.exchanges = number

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, and the common weights if local steps have left them."""
        base = [base.clone() for base in self._exchange.base] if self.since else []
        return {"steps": self.steps, "since": self.since, "exchanges": self.exchanges, "base": base}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["since"] >= self._delay or len(state["base"]) not in (0, len(self._exchange.base)):
            raise ConfigError(
                f"the saved optimizer stood {state['since']} local steps behind an exchange, with {len(state['base'])} "
                f"parameters; expected fewer than communication_delay={self._delay} and "
                f"{len(self._exchange.base)}: resume with the same options and model"
            )
        self.steps, self.since, self.exchanges = state["steps"], state["since"], state["exchanges"]
        for base, saved in zip(self._exchange.base, state["base"]):
            base.copy_(saved)


class _UpdateMode:
    """Put before an optimizer's class: its own ``step`` becomes the local step."""

    _updates: _Schedule

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one local step, and the exchange with the other ranks if it is due.

        Raises:
            ExchangeError: another rank failed or is late; the weights are those after the last
                exchange.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._updates.step(super().step)  # type: ignore[misc]
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer and of the exchange; each rank saves its own."""
        return {**super().state_dict(), _STATE_KEY: self._updates.state_dict()}  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned; load the model as well.

        Raises:
            ConfigError: the state is not of an update-mode optimizer, or of another model.
        """
        if _STATE_KEY not in state_dict:
            raise ConfigError(
                "this state was not saved by a DistributedUpdateOptimizer; load it into the plain optimizer, "
                "before that is wrapped"
            )
        own = dict(state_dict)
        self._updates.load_state_dict(own.pop(_STATE_KEY))
        super().load_state_dict(own)  # type: ignore[misc]
