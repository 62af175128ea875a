"""What an update-mode optimizer does in each step, and its exchanges with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import NonFiniteError, StateError
from ..agreement import differences
from ..saved import checksums
from .family import options_of
from .updates import Exchange, SharedSecondMoment


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
        self, optimizer: Any, exchange: Exchange, settings: Settings, moment: SharedSecondMoment | None
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
            self._step(local, skip, scaled)
        except NonFiniteError:
            self._count()  # the step was made, on all ranks
            raise
        self._count()

    def _step(self, local: Callable[[], None], skip: bool, scaled: bool) -> None:
        if self._exchange.reducer.world == 1:
            if not skip:
                local()
        elif self.steps < self._settings.warmup:
            self._warmup_step(local, scaled)
        else:
            self._local_step((lambda: None) if skip else local)

    def _count(self) -> None:
        self.steps += 1
        self._exchange.count_dense()

    def _show(self, *, warming: bool, rebuild: bool = False) -> None:
        """Show the other ranks what weights depend on: in the warm-up, on what the optimizer makes of a gradient.

        Args:
            rebuild: the second moment may be rebuilt after the exchange.
        """
        reducer = self._exchange.reducer
        show, reducer.context.operands.step = reducer.context.operands.show, reducer.next_step()
        for name, value in options_of(self._optimizer).items():
            show(name, value if warming else None)
        rebuilds = rebuild and (self.due or self._is_due(self.exchanges + 1))
        show(
            differences.COUNTERS,
            f"step {self.steps}, exchange {self.exchanges}, {'' if rebuilds else 'not '}rebuilding",
        )
        show(differences.SECOND_MOMENT, self._moment.shown() if self._moment else None)
        self._exchange.reducer.kept.show_tables()

    def _warmup_step(self, local: Callable[[], None], scaled: bool) -> None:
        self._compare(self._exchange.parameters)
        self._show(warming=True)
        if self._exchange.gradients():
            local()
        elif not scaled:
            raise self._exchange.not_finite()

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
            self._rebuild(self._moment)

    def _is_due(self, exchange: int) -> bool:
        return exchange % self._settings.rebuild_every == 0

    def _rebuild(self, moment: SharedSecondMoment) -> None:
        self.due = False
        if self._exchange.gradients():
            moment.rebuild(self.steps + 1)  # with the one that is being done

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
        _check_form(state)
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


def _check_form(state: object) -> None:
    """Refuse what is not the state of an update-mode optimizer.

    Raises:
        StateError: it is malformed.
        CorruptFrameError: it is not what was saved, by its checksums.
    """
    parts = state if isinstance(state, Mapping) else {}
    checksums.outline(parts)
    numbers = [parts.get(name) for name in ("steps", "since", "exchanges")]
    moment, resting = parts.get("second_moment", {"moved": 0, "moments": {}}), parts.get("resting", [])
    if (
        not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        or not isinstance(parts.get("base"), (list, tuple))
        or not all(isinstance(base, Tensor) and base.is_floating_point() for base in parts["base"])
        or type(parts.get("due", False)) is not bool
        or not isinstance(moment, Mapping)
        or type(moment.get("moved")) is not int
        or not isinstance(moment.get("moments"), Mapping)
        or not isinstance(resting, (list, tuple))
        or not all(isinstance(name, str) for name in resting)
    ):
        raise StateError(
            f"the saved state of an update-mode optimizer should have its counters and common weights, got "
            f"{state!r:.100}; load what its state_dict() returned"
        )
    if checksums.KEY in parts:  # earlier versions had none
        checksums.check(parts)
