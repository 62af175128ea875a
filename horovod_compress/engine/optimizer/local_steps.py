"""Update mode, step by step: when a rank's local steps are exchanged, in which parts, and when the result is applied.

A *cycle* is ``delay`` local steps, in which every fragment of the weights is exchanged once: fragment p of P at the end
of step (p + 1) delay / P. With an overlap of n, what is exchanged is applied n local steps later (Streaming DiLoCo,
Douillard et al. 2025, sections 2.2 and 2.3), and one exchange is under way at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import NonFiniteError, StateError
from ..agreement import differences
from ..reducer import Reducer
from ..saved import checksums
from . import local_state
from .family import options_of
from .fragments import Fragment, fragments_of
from .outer import Outer
from .update_moment import SharedSecondMoment
from .updates import InFlight, UpdateExchange


@dataclass(frozen=True)
class Settings:
    """The options of update mode; equal on every rank.

    Attributes:
        delay: local steps between exchanges.
        shared: whether Adam's second moment is shared.
        warmup: steps that begin the training with uncompressed gradients, if it is.
        rebuild_every: exchanges from one rebuilding of the second moment to the next.
        masking: whether momentum is emptied where updates were sent.
        warmup_exchanges: local steps after these that are each exchanged, without the outer optimizer.
        overlap: local steps from the taking of updates to their application.
        fragments: parts of the weights that are exchanged by turns.
        mixing: what part of the way weights go from this rank's own to the common ones.
        clip: "median" where no update is longer than the median of the ranks'.
        outer: whether there is an outer optimizer.
    """

    delay: int
    shared: bool
    warmup: int
    rebuild_every: int
    masking: bool
    warmup_exchanges: int = 0
    overlap: int = 0
    fragments: int = 1
    mixing: float = 1.0
    clip: str | None = None
    outer: bool = False

    @property
    def rhythm(self) -> dict[str, int]:
        """What says when exchanges begin and end: an exchange under way cannot be resumed by another one."""
        names = ("delay", "overlap", "fragments", "warmup", "warmup_exchanges")
        return {name: getattr(self, name) for name in names}

    @property
    def steady(self) -> int:
        """The number of local steps after which updates are exchanged at all their distance."""
        return self.warmup + self.warmup_exchanges


class Schedule:
    """What each step of an update-mode optimizer does.

    Args:
        moment: Adam's second moment, if the ranks share it.

    Attributes:
        steps: all local steps.
        since: local steps of the cycle that is under way.
        exchanges: those that are done or under way; the parts of one cycle count as one.
        due: whether the second moment is to be rebuilt.
        pending: the exchange under way.
        settings: when exchanges begin and end.
        saved: the program has saved what ranks have since the last step, so that its end loses nothing.
    """

    def __init__(
        self, optimizer: Any, exchange: UpdateExchange, settings: Settings, moment: SharedSecondMoment | None
    ) -> None:
        self._optimizer, self._exchange, self.settings, self._moment = optimizer, exchange, settings, moment
        self.steps = self.since = self.exchanges = 0
        self.due = False
        self.pending: InFlight | None = None
        plan, ends = exchange.reducer.plan, 0
        buckets = []
        for bucket in plan.buckets:
            begins, ends = ends, ends + len(bucket.tensors)
            buckets.append((range(begins, ends), bucket.count))
        self.fragments = fragments_of(buckets, settings.fragments, settings.delay)
        self._compared = self.saved = False

    @property
    def outer(self) -> Outer | None:
        return self._exchange.outer

    # ---- a step ----

    def step(self, local: Callable[[], None], skip: bool, scaled: bool) -> None:
        """Do one local step, and the exchange if it is due.

        Args:
            skip: a gradient scaler found an overflow on this rank: change nothing, but stay in step.
            scaled: there is a gradient scaler, which expects no error for an overflow.
        """
        self.saved = False
        try:
            if self._exchange.reducer.world == 1:
                refused = self._end_alone()
                if not skip:
                    if self._moment:
                        self._moment.let_go()
                    local()
                if refused:
                    raise refused
            elif self.steps < self.settings.warmup:
                self._compare(self._exchange.weights())
                self._show(warming=True)
                with self._unbroken():
                    finite = self._exchange.gradients(self._exchange.weights())
                if finite:
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

    def _local_step(self, local: Callable[[], None]) -> None:
        if self._moment:
            self._moment.begin(self.steps)
        fresh = [index for fragment in self.fragments if not fragment.strayed for index in fragment.indices]
        self._exchange.remember(fresh)
        for fragment in self.fragments:
            fragment.strayed = True
        first = [index for fragment in self.fragments if not fragment.since for index in fragment.indices]
        self._exchange.rest(self._exchange.leave_frozen(), first)
        local()
        self.since += 1
        for fragment in self.fragments:
            fragment.since += 1
        refused = self._age()
        if self.steps < self.settings.steady:
            self.since = 0
            self._exchange_now(self.fragments, outer=False)
        else:
            due = [fragment for fragment in self.fragments if fragment.at == self.since]
            if self.since == self.settings.delay:
                self.since = 0
            if due:
                self._exchange_soon(due)
        if refused:
            raise refused

    def prepare(self) -> None:
        """Before the optimizer's own step, let it divide by the second moment that is held, if one is."""
        if self._moment and self._moment.holds and self._exchange.reducer.world > 1:
            self._moment.prepare()

    # ---- exchanges ----

    def flush(self) -> None:
        """Exchange what local steps have done since the last exchange; all ranks have the same weights then."""
        refused = self._end_alone() if self._exchange.reducer.world == 1 else None
        if self.pending:
            refused = self._land(rebuild=False)
        self._close()
        strayed = [fragment for fragment in self.fragments if fragment.strayed]
        if strayed:
            others = (fragment for fragment in self.fragments if not fragment.strayed)
            self._exchange.remember(index for fragment in others for index in fragment.indices)
            # Gradients may be cleared by now, or those of other data: nothing is rebuilt from them.
            self.since = 0
            self._exchange_now(strayed, rebuild=False)
        if refused:
            raise refused

    def _close(self) -> None:
        """Let weights be the common ones where no local step was made since; another exchange would move momentum."""
        for fragment in self.fragments:
            if fragment.strayed and not fragment.since:
                self._exchange.go_back(fragment.indices)
                fragment.strayed = False

    def _end_alone(self) -> NonFiniteError | None:
        """Take this rank's weights for the common ones, where a larger job has left a cycle or an exchange open."""
        if not (self.pending or any(fragment.strayed for fragment in self.fragments)):
            return None
        refused = self._land(rebuild=False) if self.pending else None
        self.since = 0
        for fragment in self.fragments:
            fragment.since, fragment.strayed = 0, False
        self._exchange.resume((), ())
        return refused

    def _exchange_now(self, fragments: list[Fragment], *, outer: bool = True, rebuild: bool = True) -> None:
        """Exchange the updates of some fragments, and let weights be the common ones.

        Args:
            rebuild: the gradients are those of the last local step, so that the second moment may be rebuilt from
                them; else that waits for the next exchange.
        """
        with self._unbroken():
            pending = self._take(fragments, rebuild=rebuild)
            for fragment in fragments:
                fragment.strayed = False
            self._exchange.apply(pending, self._optimizer.state, outer=outer)
            self._rebuild(rebuild)

    def _exchange_soon(self, fragments: list[Fragment]) -> None:
        """Exchange the updates of some fragments; with an overlap, local steps go on before they are applied."""
        mixing, overlap = self.settings.mixing, self.settings.overlap
        if mixing == 1.0 and not overlap:
            self._exchange_now(fragments)
            return
        with self._unbroken():
            self.pending = self._take(fragments, rebuild=True, goes_on=bool(overlap))
        if not overlap and (refused := self._land()):
            raise refused

    def _take(self, fragments: list[Fragment], *, rebuild: bool, goes_on: bool = False) -> InFlight:
        assert self.pending is None, "one exchange is under way at a time"
        self._compare(self._exchange.base)
        local_state.tell_of_lost(self._exchange.reducer, self.exchanges)
        first = fragments[0] is self.fragments[0]
        self._show(warming=False, rebuild=rebuild and (self.due or (first and self._is_due(self.exchanges + 1))))
        if first:
            # Rounds are counted from 1, so a method's full-precision round comes after compressed ones.
            self.exchanges += 1
            self.due |= self._is_due(self.exchanges)  # also where the exchange is not finite
        for fragment in fragments:
            fragment.since = 0
        indices = sorted(index for fragment in fragments for index in fragment.indices)
        return self._exchange.take(indices, self.exchanges, self._optimizer.state, goes_on=goes_on)

    def _age(self) -> NonFiniteError | None:
        """Count a local step of the exchange under way, and end that if it is time; return why it is refused."""
        if self.pending is None:
            return None
        self.pending.age += 1
        return self._land() if self.pending.age >= self.settings.overlap else None

    def _land(self, *, rebuild: bool = True) -> NonFiniteError | None:
        """Apply what is pending; return why it is refused, if it is.

        Args:
            rebuild: see :meth:`_exchange_now`.
        """
        pending, self.pending = self.pending, None
        assert pending is not None
        try:
            with self._unbroken():
                self._exchange.apply(pending, self._optimizer.state, keep_own=True)
                self._rebuild(rebuild)
        except NonFiniteError as error:
            return error
        return None

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Let the next exchange compare weights if this part of one is broken off: other ranks may have ended it."""
        try:
            yield
        except NonFiniteError:  # on all ranks
            raise
        except BaseException:
            self._compared = False
            raise

    def _rebuild(self, wanted: bool) -> None:
        if self._moment and self.due and wanted:
            self.due = False
            if self._exchange.gradients(self._exchange.base):
                self._moment.rebuild(self.steps + 1)  # with the one that is being done

    def _is_due(self, exchange: int) -> bool:
        return exchange % self.settings.rebuild_every == 0

    # ---- what ranks compare ----

    def _show(self, *, warming: bool, rebuild: bool = False) -> None:
        """Show the other ranks what weights depend on: in the warm-up, on what the optimizer makes of a gradient.

        Args:
            rebuild: the second moment is to be rebuilt after the exchange.
        """
        shown = {name: value if warming else None for name, value in options_of(self._optimizer).items()}
        counters = f"step {self.steps}, exchange {self.exchanges}, {'' if rebuild else 'not '}rebuilding"
        moment = self._moment.shown() if self._moment else None
        shown |= {differences.COUNTERS: counters, differences.SECOND_MOMENT: moment}
        if outer := self._exchange.outer:
            shown |= outer.shown()
        reducer = self._exchange.reducer
        reducer.kept.show(reducer.next_step(), shown)

    def _compare(self, weights: Sequence[Tensor]) -> None:
        """See that all ranks are at the same point, once after the start and after each load."""
        if not self._compared:
            counters = (self.steps, self.since, self.exchanges, int(self.due))
            outer = self._exchange.outer.tensors() if self._exchange.outer else ()
            moment = self._moment.compared() if self._moment else ()
            self._exchange.compare([*weights, *moment, *outer], counters)
            self._compared = True

    def unfinished(self) -> str | None:
        """Return in words what is lost if the training ends here, unless it has been saved; None for nothing."""
        if self.saved or not (self.pending or any(fragment.strayed for fragment in self.fragments)):
            return None
        return (
            "what each rank's last local steps did was not exchanged, and ranks end with different weights; call "
            "optimizer.flush() on every rank at the end of training"
        )

    # ---- other ranks ----

    def give_up(self) -> None:
        """Forget the exchange under way, whose ranks are gone; a state is loaded then."""
        self.pending = None

    def go_on(self, reducer: Reducer) -> None:
        """Exchange with the ranks of another reducer from now on, for the same plan."""
        self._exchange.move(reducer)
        self._compared = False

    # ---- state ----

    def settle(self) -> None:
        """Wait for the results of the exchange under way, so that nothing is between two ranks."""
        if self.pending:
            try:
                with self._unbroken():
                    self._exchange.receive(self.pending)
            except BaseException:
                self.pending = None  # weights are those of before
                raise

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the common weights if local steps have left them, and what is held."""
        self.settle()
        strayed = any(fragment.strayed for fragment in self.fragments)
        base = [base.clone() for base in self._exchange.base] if strayed else []
        counters = {"steps": self.steps, "since": self.since, "exchanges": self.exchanges, "due": self.due}
        several = self._exchange.reducer.world > 1  # one rank has the optimizer's own
        held = {"second_moment": self._moment.state_dict()} if self._moment and (several or self._moment.holds) else {}
        resting = {"resting": self._exchange.resting()} if strayed else {}
        more = local_state.of(self.fragments, self.pending, self._exchange, self.since, self.settings.rhythm)
        return checksums.sealed(counters | {"base": base} | held | resting | more)

    def check(self, state: dict[str, Any]) -> None:
        """Refuse a state that does not fit.

        Raises:
            ConfigError: says what was expected.
        """
        local_state.check_form(state)
        shapes = [list(base.shape) for base in state["base"]]
        expected = [list(base.shape) for base in self._exchange.base] if local_state.has_strayed(state) else []
        if state["since"] >= self.settings.delay or shapes != expected:
            raise StateError(
                f"the saved optimizer was {state['since']} local steps past an exchange, with the common weights of "
                f"{len(shapes)} parameters; expected fewer steps than communication_delay={self.settings.delay} and "
                f"{len(expected)} parameters of the same shapes: resume with the same options and model"
            )
        local_state.check_fits(state, self.fragments, self.settings.rhythm, self._exchange)
        if self._moment and "second_moment" in state:
            self._moment.check(state["second_moment"], warming=state["steps"] < self.settings.warmup)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned and :meth:`check` accepted."""
        self.settle()
        self.steps, self.since, self.exchanges = state["steps"], state["since"], state["exchanges"]
        self.due = state["due"]
        self._compared = False
        if self._moment:
            self._moment.load_state_dict(state.get("second_moment", {"moved": -1, "moments": {}}))  # one rank has none
        self._exchange.resume(state.get("resting", ()), state.get("mixed", ()))
        # None are saved right after an exchange: they are the weights.
        for base, saved in zip(self._exchange.base, state["base"], strict=False):
            base.copy_(saved)
        self.pending = local_state.load(state, self.fragments, self._exchange)
